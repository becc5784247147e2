//! How much of a model a container keeps, in one word.

use rill_format::container::{Codec, CodecName};

use crate::error::ConvertError;
use crate::plan::{ExpertCodec, TrunkCodec};
use crate::source::{ConvertSource, SourceMatrix};

/// Formats that belong together. Bits are those of a weight of Kimi K3's experts, side information
/// included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quality {
    /// Every bit of every weight.
    Lossless,
    /// Experts of 3.39 bits, other matrices of 4.
    High,
    /// Experts of 3.01 bits, other matrices of 4.
    Standard,
    /// Experts of 2.51 bits, other matrices of 4.
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
        let coded = || -> Result<bool, ConvertError> {
            let experts = source.experts()?;
            let is_mxfp4 = |matrix: &SourceMatrix| {
                let of = |name| matrix.form.is(Codec::plain(name));
                of(CodecName::Mxfp4) || of(CodecName::Mxfp4z)
            };
            Ok(experts.is_some_and(|experts| experts.matrices.iter().all(is_mxfp4)))
        };
        // Those that are rotated have no side information, and get its eighth of a bit.
        let more = |rate: u8| -> Result<u8, ConvertError> { Ok(rate + u8::from(!coded()?)) };
        let rate = match self {
            Self::Lossless => {
                // Entropy-coded if they are MXFP4, which nothing is lost of; otherwise as they are.
                let experts = if coded()? { ExpertCodec::Mxfp4z } else { ExpertCodec::Source };
                return Ok((experts, TrunkCodec::Source));
            }
            Self::High => more(26)?,
            Self::Standard => more(23)?,
            Self::Small => more(19)?,
        };
        Ok((ExpertCodec::Trellis { rate }, TrunkCodec::Q4))
    }
}
