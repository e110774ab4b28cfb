pub struct Etcd;
pub struct EtcdConfig;
