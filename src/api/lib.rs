//! The resource model: what a Kubernetes object is, as data.
//!
//! One row of [`registry`] per resource, one node of [`schema`] per type; everything that the API
//! server does to an object (decode, prune, default, validate, merge, print, encode) is a walk over
//! these two tables. Built-in kinds come from [`facts`] (generated, checked in), custom ones from
//! their CustomResourceDefinition; no code tells them apart afterwards.
//!
//! # Invariants
//!
//! - No I/O, no async, no clock but an argument (`now`), no randomness.
//! - Objects are `serde_json::Value` with sorted keys. There are no generated types per kind: a kind is a row.
//! - No panic on input. Depth, sizes of regular expressions and lengths read from a message are bounded.
//! - Descriptions (prose of the types) are not kept in memory: OpenAPI loads them on use and drops them.
//!
//! # Code map
//!
//! | module | what |
//! | --- | --- |
//! | [`meta`] | accessors to `metadata` |
//! | [`quantity`], [`selector`], [`content`] | exact amounts; label and field selectors; rules for names |
//! | [`schema`] | the arena of types: decode, prune, default, check, validate; CRD schemas |
//! | [`registry`] | the table of resources; rows out of CRDs |
//! | [`facts`] | loads the generated facts into both tables |
//! | [`discovery`], [`openapi`] | documents built from the tables |
//! | [`protobuf`] | transcodes JSON values to and from Kubernetes' protobuf, by field number |
//! | [`status`], [`field`] | errors: `Status` objects and field errors |
//! | [`strategy`] | what is special about a kind |
//! | [`patch`] | JSON, merge and strategic merge patch; server-side apply |
//! | [`table`] | columns and rows for `kubectl get` |
//! | [`convert`] | conversions between versions |

pub mod content;
pub mod convert;
pub mod discovery;
pub mod facts;
pub mod field;
pub mod meta;
pub mod openapi;
pub mod patch;
pub mod protobuf;
pub mod quantity;
pub mod registry;
pub mod schema;
pub mod selector;
pub mod status;
pub mod strategy;
pub mod table;

pub use status::ApiError;
