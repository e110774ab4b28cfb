//! Tests of discovery.
