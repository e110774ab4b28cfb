//! windlass-admin
