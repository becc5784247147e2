//! rill-format
