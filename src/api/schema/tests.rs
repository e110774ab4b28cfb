//! Tests of the schema engine.
