//! How well a model predicts a text.

use std::ops::ControlFlow;

use crate::engine::Engine;
use crate::error::Error;
use crate::step::Logits;

/// The result of [`Engine::perplexity`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    /// `exp` of the mean negative log-likelihood.
    pub perplexity: f64,
    /// Tokens predicted.
    pub tokens: usize,
    /// Windows the text was cut into.
    pub windows: usize,
}

impl Perplexity {
    /// Positions whose logits are held at a time: those of a whole window of a large vocabulary
    /// would be hundreds of megabytes.
    pub const POSITIONS: usize = 64;
}

impl Engine {
    /// Cuts `tokens` into windows of `window` tokens (dropping the rest), starts each with the
    /// BOS token and fresh state, and averages how badly each token was predicted. `progress` is
    /// told windows done and in all, and may break off with [`Error::Cancelled`].
    pub fn perplexity(
        &self,
        tokens: &[u32],
        window: usize,
        progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Perplexity, Error> {
        let window = window.max(1);
        let windows = tokens.len() / window;
        if windows == 0 {
            return Err(Error::TextTooShort { found: tokens.len(), needed: window });
        }
        let mut total = 0.0;
        for (i, targets) in tokens.chunks_exact(window).enumerate() {
            let mut session = self.new_session();
            let mut input = vec![self.config().bos_token_id];
            input.extend(&targets[..window - 1]);
            let pieces = input.chunks(Perplexity::POSITIONS);
            for (input, targets) in pieces.zip(targets.chunks(Perplexity::POSITIONS)) {
                let logits = self.forward(&mut session, input, Logits::All)?;
                let rows = logits.chunks_exact(self.config().vocab_size);
                total += rows.zip(targets).map(|(row, &id)| surprise(row, id)).sum::<f64>();
            }
            if progress(i + 1, windows).is_break() {
                return Err(Error::Cancelled);
            }
        }
        let tokens = windows * window;
        Ok(Perplexity { perplexity: (total / tokens as f64).exp(), tokens, windows })
    }
}

/// Negative log-likelihood of `id`, in nats. A statistic, not part of the model: it may use the
/// system's mathematics.
pub(crate) fn surprise(logits: &[f32], id: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    total.ln() - f64::from(logits[id as usize] - max)
}
