//! rill-kernels
