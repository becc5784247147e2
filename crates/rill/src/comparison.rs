//! How far a model with smaller weights is from the one it was made from.

use std::ops::ControlFlow;

use crate::engine::Engine;
use crate::error::Error;
use crate::experts::LayerIdx;
use crate::perplexity::{Perplexity, surprise};
use crate::step::{Logits, Observer};

/// The result of [`Engine::compare`].
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Of the model that is compared.
    pub perplexity: Perplexity,
    /// Perplexity of the model that it is compared with.
    pub reference_perplexity: f64,
    /// Mean over tokens of `Σ p·ln(p/q)`, p being the reference's distribution: nats per token.
    pub kl_divergence: f64,
    /// Share of positions at which both find the same token likeliest.
    pub agreement: f64,
    /// Per layer ‖h − h'‖ / ‖h‖ over all positions, of the layer's output when it gets the reference's
    /// input: what this layer's weights alone do.
    pub layer_errors: Vec<f64>,
}

impl Engine {
    /// Compares with a model of the same shape over `tokens`, cut as for [`perplexity`](Self::perplexity).
    /// Every piece is computed three times: by the reference, by this model, and by this model with the
    /// reference's hidden state before every layer.
    ///
    /// # Errors
    /// When the models have other layers or another vocabulary; else as for `perplexity`.
    pub fn compare(
        &self,
        reference: &Engine,
        tokens: &[u32],
        window: usize,
        progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Comparison, Error> {
        let (config, theirs) = (self.config(), reference.config());
        let n_layers = config.layers.len();
        let shape = [n_layers, config.hidden_size, config.vocab_size];
        let expected = [theirs.layers.len(), theirs.hidden_size, theirs.vocab_size];
        if shape != expected {
            return Err(Error::OtherModel { found: shape, expected });
        }
        let window = window.max(1);
        let windows = tokens.len() / window;
        if windows == 0 {
            return Err(Error::TextTooShort { found: tokens.len(), needed: window });
        }
        let (mut surprise_here, mut surprise_there) = (0.0, 0.0);
        let (mut divergence, mut same) = (0.0, 0usize);
        let mut distances = vec![Distance::default(); n_layers];
        for (i, targets) in tokens.chunks_exact(window).enumerate() {
            let mut session_there = reference.new_session();
            let [mut session_here, mut session_led] = [self.new_session(), self.new_session()];
            let mut input = vec![config.bos_token_id];
            input.extend(&targets[..window - 1]);
            let pieces = input.chunks(Perplexity::POSITIONS);
            for (input, targets) in pieces.zip(targets.chunks(Perplexity::POSITIONS)) {
                let mut hidden = Recorder(vec![Vec::new(); n_layers]);
                let there = reference.forward_observed(
                    &mut session_there,
                    input,
                    Logits::All,
                    &mut hidden,
                )?;
                let here = self.forward(&mut session_here, input, Logits::All)?;
                let mut leader = Leader {
                    hidden: &hidden.0,
                    done: vec![0; n_layers],
                    distances: &mut distances,
                };
                self.forward_observed(&mut session_led, input, Logits::Last, &mut leader)?;
                let vocab = config.vocab_size;
                let rows = here.chunks_exact(vocab).zip(there.chunks_exact(vocab));
                for ((here, there), &id) in rows.zip(targets) {
                    surprise_here += surprise(here, id);
                    surprise_there += surprise(there, id);
                    divergence += kl_divergence(there, here);
                    same += usize::from(likeliest(here) == likeliest(there));
                }
            }
            if progress(i + 1, windows).is_break() {
                return Err(Error::Cancelled);
            }
        }
        let tokens = windows * window;
        let n = tokens as f64;
        Ok(Comparison {
            perplexity: Perplexity { perplexity: (surprise_here / n).exp(), tokens, windows },
            reference_perplexity: (surprise_there / n).exp(),
            kl_divergence: divergence / n,
            agreement: same as f64 / n,
            layer_errors: distances.iter().map(Distance::relative).collect(),
        })
    }
}

/// Hidden states after every layer, (tokens, hidden) each.
struct Recorder(Vec<Vec<f32>>);

impl Observer for Recorder {
    fn after_layer(&mut self, layer: LayerIdx, hidden: &mut [f32]) -> ControlFlow<()> {
        self.0[layer.0].extend_from_slice(hidden);
        ControlFlow::Continue(())
    }
}

/// Measures each layer's output and puts the recorded one in its place.
struct Leader<'a> {
    hidden: &'a [Vec<f32>],
    /// Values of each layer that have been seen: a piece may come in chunks.
    done: Vec<usize>,
    distances: &'a mut [Distance],
}

impl Observer for Leader<'_> {
    fn after_layer(&mut self, layer: LayerIdx, hidden: &mut [f32]) -> ControlFlow<()> {
        let done = &mut self.done[layer.0];
        let expected = &self.hidden[layer.0][*done..][..hidden.len()];
        *done += hidden.len();
        for (found, &expected) in hidden.iter().zip(expected) {
            let distance = &mut self.distances[layer.0];
            distance.lost += (f64::from(*found) - f64::from(expected)).powi(2);
            distance.all += f64::from(expected).powi(2);
        }
        hidden.copy_from_slice(expected);
        ControlFlow::Continue(())
    }
}

/// Sums of squares.
#[derive(Clone, Copy, Default)]
struct Distance {
    lost: f64,
    all: f64,
}

impl Distance {
    fn relative(&self) -> f64 {
        if self.lost == 0.0 { 0.0 } else { (self.lost / self.all).sqrt() }
    }
}

/// `Σ p·ln(p/q)` of two distributions by their logits, in nats.
fn kl_divergence(p: &[f32], q: &[f32]) -> f64 {
    let normaliser = |logits: &[f32]| {
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        max + logits.iter().map(|&l| (f64::from(l) - max).exp()).sum::<f64>().ln()
    };
    let (of_p, of_q) = (normaliser(p), normaliser(q));
    let term = |(&p, &q): (&f32, &f32)| {
        let (ln_p, ln_q) = (f64::from(p) - of_p, f64::from(q) - of_q);
        ln_p.exp() * (ln_p - ln_q)
    };
    p.iter().zip(q).map(term).sum()
}

/// Index of the largest logit, the first of equals.
fn likeliest(logits: &[f32]) -> usize {
    (1..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

#[cfg(test)]
mod tests {
    use super::{Distance, Leader, kl_divergence, likeliest};
    use crate::experts::LayerIdx;
    use crate::step::Observer;

    #[test]
    fn a_layers_output_is_measured_and_replaced_chunk_by_chunk() {
        let recorded = [vec![0.0; 4], vec![3.0, 4.0, 0.0, 5.0]];
        let mut distances = vec![Distance::default(); 2];
        let mut leader = Leader { hidden: &recorded, done: vec![0; 2], distances: &mut distances };
        for (mut chunk, expected) in [([3.0, 5.0], [3.0, 4.0]), ([0.0, 5.0], [0.0, 5.0])] {
            assert!(leader.after_layer(LayerIdx(1), &mut chunk).is_continue());
            assert_eq!(chunk, expected);
        }
        assert_eq!(distances[0].relative(), 0.0);
        assert_eq!(distances[1].relative(), (1.0f64 / 50.0).sqrt());
    }

    #[test]
    fn the_divergence_of_two_coins_is_known() {
        // p = (1/2, 1/2), q = (1/4, 3/4): ½·ln 2 + ½·ln ⅔.
        let (p, q) = ([7.0, 7.0], [0.0, 3.0f32.ln()]);
        let expected = 0.5 * 2.0f64.ln() + 0.5 * (2.0f64 / 3.0).ln();
        assert!((kl_divergence(&p, &q) - expected).abs() < 1e-7);
        assert!(kl_divergence(&p, &p).abs() < 1e-15);
        assert!(kl_divergence(&q, &p) > 0.0);
    }

    #[test]
    fn the_first_of_equals_is_the_likeliest() {
        assert_eq!(likeliest(&[1.0, 3.0, 3.0, -2.0]), 1);
    }
}
