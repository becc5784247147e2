//! rill
pub mod config;
