//! windlass-apiserver: the Kubernetes API over a revisioned store.
//!
//! # Invariants
//! - One pipeline serves every resource; a kind is a row of [`windlass_api::registry`], never a handler.
//! - Only this crate touches the store. What other roles know, they know through the API.
//! - Between decoding and storage an object is in its storage version, a JSON value checked by its schema.
//! - Bytes are made once: an object when it is written, a watch frame when the first watcher needs it.
//! - Everything a client can make grow is bounded: bodies, depth, numbers of requests, queues of watchers, histories.
//! - A bad request is answered by a 4xx that says why; it never costs more than reading it.
//! - Deliberately absent: handlers per kind, a second encoding in the store, polling, state that the store does not have.
//!
//! # Code map
//! | module | what |
//! | --- | --- |
//! | [`server`], [`core`] | routes; the pipeline around every handler |
//! | [`request`], [`content`] | what is asked, by whom; media types, bodies, compression |
//! | [`rest`] | verbs: get, list, watch, create, update, patch, delete |
//! | [`subresources`], [`reviews`], [`proxy`] | subresources with rules of their own; reviews; connections to kubelets and pods |
//! | [`storage`], [`feed`], [`cache`] | the one door to objects; what drives the caches; snapshot, history and watchers |
//! | [`documents`] | discovery, OpenAPI, issuer |
//! | [`crd`] | resources that come and go at run time |
//! | [`virtuals`], [`usage`] | resources that others hold; `metrics.k8s.io` |
//! | [`authn`], [`authz`], [`admission`] | who, may they, and what becomes of it |
//! | [`pki`], [`token`], [`bootstrap`], [`allocate`] | keys and certificates; service account tokens; first objects; addresses and ports |

pub mod admission;
pub mod allocate;
pub mod authn;
pub mod authz;
pub mod bootstrap;
pub mod cache;
pub mod cluster;
pub mod config;
pub mod content;
pub mod core;
pub mod crd;
pub mod documents;
pub mod feed;
pub mod hooks;
mod instance;
pub mod kubelet;
pub mod metrics;
pub mod pki;
pub mod proxy;
pub mod request;
pub mod rest;
pub mod reviews;
pub mod server;
pub mod storage;
pub mod subresources;
pub mod token;
pub mod usage;
pub mod virtuals;

pub use config::Config;
pub use instance::{ApiServer, Error};
