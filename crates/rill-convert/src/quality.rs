//! How much of a model a container keeps, in one word.

use crate::error::ConvertError;
use crate::plan::{ExpertCodec, TrunkCodec};
use crate::source::ConvertSource;

/// Formats that belong together. Bits are those of a weight of Kimi K3's experts, side information
/// included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quality {
    /// Every bit of every weight.
    Lossless,
    /// Experts of 3.39 bits, other matrices of 4.
    High,
    /// Experts of 3.02 bits, other matrices of 4.
    Standard,
    /// Experts of 2.52 bits, other matrices of 4.
    Small,
}

impl Quality {
    /// The formats for a source.
    ///
    /// # Errors
    /// When the source's experts are not all there.
    pub fn codecs(
        self,
        source: &dyn ConvertSource,
    ) -> Result<(ExpertCodec, TrunkCodec), ConvertError> {
        let rate = match self {
            Self::Lossless => return Ok((ExpertCodec::Source, TrunkCodec::Source)),
            Self::High => 26,
            Self::Standard => 23,
            Self::Small => 19,
        };
        source.experts()?;
        Ok((ExpertCodec::Trellis { rate }, TrunkCodec::Q4))
    }
}
