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
            #[serde(default)]
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
