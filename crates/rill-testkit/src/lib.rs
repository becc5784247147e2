//! rill-testkit
