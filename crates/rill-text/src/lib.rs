//! rill-text
