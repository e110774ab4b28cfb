//! Packs for the binary what is only data: the facts (checked in as readable JSON), and the descriptions of
//! types and fields, which come from `k8s-openapi`'s schemas.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::{env, fs};

use serde_json::{Map, Value};

fn main() {
    println!("cargo::rerun-if-changed=facts");
    println!("cargo::rerun-if-changed=build.rs");
    let mut facts = Map::new();
    for name in ["types", "resources", "selectors"] {
        let file = format!("facts/{name}.json");
        let text = fs::read(&file).unwrap_or_else(|error| panic!("{file}: {error}; run `cargo run -p windlass-facts`"));
        let value = serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
        facts.insert(name.to_owned(), value);
    }
    pack("facts.bin", &facts.into());
    pack("descriptions.bin", &descriptions().into());
}

fn pack(name: &str, value: &Value) {
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let file = File::create(Path::new(&out).join(name)).expect("OUT_DIR is writable");
    let mut packed = flate2::write::DeflateEncoder::new(file, flate2::Compression::best());
    packed.write_all(&serde_json::to_vec(value).expect("JSON serializes")).expect("OUT_DIR is writable");
    packed.finish().expect("OUT_DIR is writable");
}

macro_rules! register {
    ($generator:expr, $($($module:ident)::+ : $($kind:ident)+;)+) => {
        $({
            use k8s_openapi::$($module)::+ as kinds;
            $( let _ = $generator.subschema_for::<kinds::$kind>(); )+
        })+
    };
}

/// Descriptions by definition: `{"io.k8s.api.core.v1.Pod": {"": "of the type", "spec": "of a field"}}`.
fn descriptions() -> Map<String, Value> {
    let mut generator = schemars::SchemaGenerator::default();
    register! { generator,
        api::admissionregistration::v1: MutatingAdmissionPolicy MutatingAdmissionPolicyBinding MutatingWebhookConfiguration
            ValidatingAdmissionPolicy ValidatingAdmissionPolicyBinding ValidatingWebhookConfiguration;
        api::apps::v1: ControllerRevision DaemonSet Deployment ReplicaSet StatefulSet;
        api::authentication::v1: SelfSubjectReview TokenRequest TokenReview;
        api::authorization::v1: LocalSubjectAccessReview SelfSubjectAccessReview SelfSubjectRulesReview SubjectAccessReview;
        api::autoscaling::v1: HorizontalPodAutoscaler Scale;
        api::autoscaling::v2: HorizontalPodAutoscaler;
        api::batch::v1: CronJob Job;
        api::certificates::v1: CertificateSigningRequest ClusterTrustBundle PodCertificateRequest;
        api::coordination::v1: Lease;
        api::core::v1: Binding ComponentStatus ConfigMap Endpoints Event LimitRange Namespace Node PersistentVolume
            PersistentVolumeClaim Pod PodTemplate ReplicationController ResourceQuota Secret Service ServiceAccount;
        api::discovery::v1: EndpointSlice;
        api::events::v1: Event;
        api::flowcontrol::v1: FlowSchema PriorityLevelConfiguration;
        api::networking::v1: IPAddress Ingress IngressClass NetworkPolicy ServiceCIDR;
        api::node::v1: RuntimeClass;
        api::policy::v1: Eviction PodDisruptionBudget;
        api::rbac::v1: ClusterRole ClusterRoleBinding Role RoleBinding;
        api::resource::v1: DeviceClass DeviceTaintRule ResourceClaim ResourceClaimTemplate ResourceSlice;
        api::scheduling::v1: PriorityClass;
        api::storage::v1: CSIDriver CSINode CSIStorageCapacity StorageClass VolumeAttachment VolumeAttributesClass;
        api::storagemigration::v1: StorageVersionMigration;
        apiextensions_apiserver::pkg::apis::apiextensions::v1: CustomResourceDefinition;
        kube_aggregator::pkg::apis::apiregistration::v1: APIService;
        apimachinery::pkg::apis::meta::v1: APIGroup APIGroupList APIResourceList APIVersions DeleteOptions ListMeta Status;
    }
    let definitions = generator.definitions().iter();
    definitions
        .map(|(name, schema)| {
            let mut texts = Map::new();
            let mut keep = |key: &str, schema: &Value| {
                if let Some(text) = schema["description"].as_str() {
                    texts.insert(key.to_owned(), text.into());
                }
            };
            keep("", schema);
            for (field, schema) in schema["properties"].as_object().into_iter().flatten() {
                keep(field, schema);
            }
            (name.clone(), texts.into())
        })
        .collect()
}
