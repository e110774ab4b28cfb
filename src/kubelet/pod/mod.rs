//! One pod: pure decisions about it, and the actor that carries them out.

pub mod actor;
pub mod build;
pub mod check;
pub mod cleanup;
pub mod conditions;
pub mod env;
pub mod message;
pub mod model;
pub mod names;
pub mod patch;
pub mod plan;
pub mod probe;
pub mod report;
pub mod resources;
pub mod start;
pub mod status;
pub mod stop;
