use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};

/// Declares a struct of only those fields of a Kubernetes type that a role reads, plus `metadata`.
///
/// It lists and watches as the full type does, so `Api<PodView>` and `Informer<PodView>` work; what is not declared is
/// dropped while parsing and costs no memory. Never write a projection back: patch instead.
///
/// ```
/// windlass_client::projection! {
///     /// What the example reads of a pod.
///     pub struct PodView: k8s_openapi::api::core::v1::Pod {
///         pub spec: SpecView,
///     }
/// }
/// #[derive(Clone, Debug, Default, serde::Deserialize)]
/// #[serde(rename_all = "camelCase")]
/// pub struct SpecView { pub node_name: Option<String> }
/// ```
#[macro_export]
macro_rules! projection {
    ($(#[$attr:meta])* $vis:vis struct $name:ident : $full:ty { $($(#[$fattr:meta])* $fvis:vis $field:ident : $ty:ty),* $(,)? }) => {
        $(#[$attr])*
        #[derive(Clone, Debug, Default, $crate::reexport::serde::Deserialize)]
        #[serde(crate = "windlass_client::reexport::serde", rename_all = "camelCase")]
        $vis struct $name {
            #[serde(default, deserialize_with = "windlass_client::reexport::lean_metadata")]
            pub metadata: $crate::reexport::k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
            $($(#[$fattr])* #[serde(default)] $fvis $field: $ty),*
        }

        impl $crate::reexport::k8s_openapi::Resource for $name {
            const API_VERSION: &'static str = <$full as $crate::reexport::k8s_openapi::Resource>::API_VERSION;
            const GROUP: &'static str = <$full as $crate::reexport::k8s_openapi::Resource>::GROUP;
            const KIND: &'static str = <$full as $crate::reexport::k8s_openapi::Resource>::KIND;
            const VERSION: &'static str = <$full as $crate::reexport::k8s_openapi::Resource>::VERSION;
            const URL_PATH_SEGMENT: &'static str = <$full as $crate::reexport::k8s_openapi::Resource>::URL_PATH_SEGMENT;
            type Scope = <$full as $crate::reexport::k8s_openapi::Resource>::Scope;
        }

        impl $crate::reexport::k8s_openapi::Metadata for $name {
            type Ty = $crate::reexport::k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
            fn metadata(&self) -> &Self::Ty {
                &self.metadata
            }
            fn metadata_mut(&mut self) -> &mut Self::Ty {
                &mut self.metadata
            }
        }
    };
}

/// Reads an object's metadata and passes over `managedFields`, which are often larger than the rest and never read here.
#[doc(hidden)]
pub fn lean_metadata<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Default, serde::Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct Lean {
        annotations: Option<BTreeMap<String, String>>,
        creation_timestamp: Option<Time>,
        deletion_grace_period_seconds: Option<i64>,
        deletion_timestamp: Option<Time>,
        finalizers: Option<Vec<String>>,
        generate_name: Option<String>,
        generation: Option<i64>,
        labels: Option<BTreeMap<String, String>>,
        name: Option<String>,
        namespace: Option<String>,
        owner_references: Option<Vec<OwnerReference>>,
        resource_version: Option<String>,
        uid: Option<String>,
    }
    let lean = <Option<Lean> as serde::Deserialize>::deserialize(deserializer)?.unwrap_or_default();
    Ok(ObjectMeta {
        annotations: lean.annotations,
        creation_timestamp: lean.creation_timestamp,
        deletion_grace_period_seconds: lean.deletion_grace_period_seconds,
        deletion_timestamp: lean.deletion_timestamp,
        finalizers: lean.finalizers,
        generate_name: lean.generate_name,
        generation: lean.generation,
        labels: lean.labels,
        managed_fields: None,
        name: lean.name,
        namespace: lean.namespace,
        owner_references: lean.owner_references,
        resource_version: lean.resource_version,
        self_link: None,
        uid: lean.uid,
    })
}
