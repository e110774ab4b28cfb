//! What can go wrong for the kubelet as a whole. Failures of one pod are its status and events, not errors.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Runtime(#[from] crate::runtime::Error),
    #[error("pod network: {0}")]
    Network(#[from] windlass_net::Error),
    #[error("configuration: {field} {value:?}: {reason}")]
    Config { field: &'static str, value: String, reason: String },
    #[error("{action} {path}: {source}", path = path.display())]
    File { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("API server: {action}: {source}")]
    Api { action: &'static str, source: Box<kube::Error> },
    #[error("kubelet server: {0}")]
    Server(String),
}

impl Error {
    pub fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }
    pub fn api(action: &'static str) -> impl FnOnce(kube::Error) -> Self {
        move |source| Self::Api { action, source: Box::new(source) }
    }
}
