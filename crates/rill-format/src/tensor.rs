//! What is known of a tensor without its bytes.

use std::fmt;
use std::ops::Deref;

use half::{bf16, f16};

/// The most dimensions a tensor may have. Weights have five at most (a 3-D convolution).
pub const MAX_RANK: usize = 8;

/// An element type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16: the upper half of an F32.
    BF16,
    /// Bytes; packed formats store their codes and scales this way.
    U8,
}

impl Dtype {
    /// Bytes per element.
    pub const fn size(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::U8 => 1,
        }
    }

    /// Little-endian elements as f32, exactly. Bytes that do not make a whole element at the end are
    /// left out.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        match self {
            Self::BF16 => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
            Self::F16 => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
            Self::F32 => {
                let quads = bytes.chunks_exact(4);
                quads.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            Self::U8 => bytes.iter().map(|&b| f32::from(b)).collect(),
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        match name {
            "F32" => Some(Self::F32),
            "F16" => Some(Self::F16),
            "BF16" => Some(Self::BF16),
            "U8" => Some(Self::U8),
            _ => None,
        }
    }
}

/// The safetensors name.
impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::U8 => "U8",
        })
    }
}

/// A tensor's number within the [`Checkpoint`](crate::Checkpoint) that issued it. Ascending ids
/// ascend in each shard's file, so reading in id order reads forward.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TensorId(pub(crate) u32);

/// Dimensions, outermost first, at most [`MAX_RANK`]. Reads as a `[u64]`; a scalar has none.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    rank: u8,
    // Zero beyond `rank`, so that equality can be derived.
    dims: [u64; MAX_RANK],
}

impl Shape {
    /// The shape with these dimensions, or `None` if there are more than [`MAX_RANK`].
    pub fn new(dims: &[u64]) -> Option<Self> {
        let mut shape = Self::scalar();
        dims.iter().all(|&dim| shape.push(dim)).then_some(shape)
    }

    pub(crate) const fn scalar() -> Self {
        Self { rank: 0, dims: [0; MAX_RANK] }
    }

    /// Adds an innermost dimension; false if there is no room.
    pub(crate) fn push(&mut self, dim: u64) -> bool {
        match self.dims.get_mut(usize::from(self.rank)) {
            Some(place) => {
                *place = dim;
                self.rank += 1;
                true
            }
            None => false,
        }
    }
}

impl Deref for Shape {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        &self.dims[..usize::from(self.rank)]
    }
}

/// As a list: `[7168, 96]`.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

/// A tensor of an open checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TensorInfo<'a> {
    /// Its number, for reading.
    pub id: TensorId,
    /// Its full name.
    pub name: &'a str,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions.
    pub shape: Shape,
    /// Its size in bytes: the product of the dimensions times the element size.
    pub bytes: u64,
    /// The file that holds it, relative to the checkpoint's folder.
    pub shard: &'a str,
}

/// Bytes of a tensor, or `None` if they do not fit in 64 bits.
pub(crate) fn size_bytes(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    // An empty tensor counts as if its zeros were ones, so that no product of dimensions of an
    // accepted shape, in any order, can overflow.
    let bytes = shape.iter().try_fold(dtype.size(), |bytes, &dim| bytes.checked_mul(dim.max(1)))?;
    Some(if shape.contains(&0) { 0 } else { bytes })
}
