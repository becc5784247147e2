//! The `rill` program.
fn main() {}
