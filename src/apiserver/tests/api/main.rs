//! The API server as its clients see it. One program, since linking is what costs.

mod common;
mod custom;
mod hostile;
mod lists;
mod servers;
mod verbs;
