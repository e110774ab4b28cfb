//! The store's tests: one suite on both back ends, and what is special about each.

mod crash;
mod embedded;
mod etcd;
mod full;
mod suite;
