use crate::Geometry;

/// What recent tokens chose, and what that says of the next one: text repeats itself, and so does
/// its routing.
///
/// Tokens are known by their distance: `likeness[d]` says how much the layers that ran last chose
/// as they did `d` tokens earlier. What came after a token that was much like this one is then
/// likely to come again.
#[derive(Clone, Debug)]
pub(super) struct History {
    /// 64-bit words of one choice, a bit for every expert.
    n_words: usize,
    /// `(n_layers, MEMORY, n_words)`; a layer's choices go round in a ring.
    chosen: Vec<u64>,
    /// Choices seen, by layer, `(n_layers)`
    n_seen: Vec<usize>,
    /// Share of experts in common, averaged over layers, from 0 to 1, `(MEMORY)`
    likeness: Vec<f32>,
}

impl History {
    pub(super) fn new(geometry: Geometry) -> Self {
        let n_words = (geometry.n_experts as usize).div_ceil(64);
        let n_layers = geometry.n_layers as usize;
        Self {
            n_words,
            chosen: vec![0; n_layers * MEMORY * n_words],
            n_seen: vec![0; n_layers],
            likeness: vec![0.0; MEMORY],
        }
    }

    /// Choices of `layer` before the latest one that are still remembered.
    pub(super) fn n_earlier(&self, layer: u32) -> usize {
        self.n_seen[layer as usize].saturating_sub(1).min(MEMORY - 1)
    }

    /// Remembers that `layer` chose `experts`.
    pub(super) fn push(&mut self, layer: u32, experts: &[u32]) {
        self.n_seen[layer as usize] += 1;
        let latest = self.place(layer, 0);
        let row = &mut self.chosen[latest..][..self.n_words];
        row.fill(0);
        for &expert in experts {
            row[expert as usize / 64] |= 1 << (expert % 64);
        }

        let row = &self.chosen[latest..][..self.n_words];
        let n_chosen = row.iter().map(|w| w.count_ones()).sum::<u32>().max(1) as f32;
        for distance in 1..=self.n_earlier(layer) {
            let earlier = &self.chosen[self.place(layer, distance)..][..self.n_words];
            let common = row.iter().zip(earlier).map(|(a, b)| (a & b).count_ones()).sum::<u32>();
            let likeness = &mut self.likeness[distance];
            *likeness = KEEP * *likeness + (1.0 - KEEP) * (common as f32 / n_chosen);
        }
    }

    /// How likely each expert is in the next choice of `layer`, `(n_experts)`, judged by what came
    /// after earlier tokens, the more like this one the more. All zero where nothing is remembered.
    pub(super) fn expect(&self, layer: u32, expected: &mut [f32]) {
        expected.fill(0.0);
        let mut total = 0.0;
        for distance in 1..=self.n_earlier(layer) {
            let weight = exp2(SHARPNESS * (self.likeness[distance] - 1.0));
            total += weight;
            let after = &self.chosen[self.place(layer, distance - 1)..][..self.n_words];
            for (expected, &word) in expected.chunks_mut(64).zip(after) {
                let mut word = word;
                while word != 0 {
                    expected[word.trailing_zeros() as usize] += weight;
                    word &= word - 1;
                }
            }
        }
        if total > 0.0 {
            for expected in expected {
                *expected /= total;
            }
        }
    }

    /// Where a layer's choice of `distance` tokens ago starts.
    fn place(&self, layer: u32, distance: usize) -> usize {
        let turn = (self.n_seen[layer as usize] - 1 - distance) % MEMORY;
        (layer as usize * MEMORY + turn) * self.n_words
    }
}

/// 2^x to about 1e-5 for x from -100 to 0, the same on every machine.
fn exp2(x: f32) -> f32 {
    let whole = x.floor();
    // e^(f ln 2) for f from 0 to 1: the first terms of its series.
    let y = (x - whole) * std::f32::consts::LN_2;
    let part = 1.0
        + y * (1.0
            + y / 2.0 * (1.0 + y / 3.0 * (1.0 + y / 4.0 * (1.0 + y / 5.0 * (1.0 + y / 6.0)))));
    f32::from_bits(((whole as i32 + 127) as u32) << 23) * part
}

/// Tokens remembered. With Kimi-Linear, 64 lose a third of the gain; more than 256 were not tried.
const MEMORY: usize = 256;
/// 2^(-1/7): likeness goes by the last dozen layers. Half-lives from 5 to 18 layers do as well.
const KEEP: f32 = 0.905_723_66;
/// Doublings of a token's weight between nothing and everything in common: 17.6 in powers of e.
const SHARPNESS: f32 = 25.4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp2_is_close_to_the_systems() {
        for i in 0..=100_000 {
            let x = -1e-3 * i as f32;
            let expected = f64::from(x).exp2();
            let error = (f64::from(exp2(x)) - expected).abs() / expected;
            assert!(error < 2e-5, "2^{x}: {} instead of {expected}", exp2(x));
        }
    }

    #[test]
    fn what_came_after_a_token_like_this_one_is_expected() {
        let mut history = History::new(Geometry { n_layers: 2, n_experts: 70 });
        let mut expected = vec![1.0; 70];
        history.push(0, &[1, 2]);
        history.expect(0, &mut expected);
        assert!(expected.iter().all(|&e| e == 0.0), "nothing is known yet: {expected:?}");

        // Longer than it remembers: (1, 2), (3, 69), (4, 5), then the same again.
        for experts in [[3, 69], [4, 5], [1, 2]].iter().cycle().take(3 * MEMORY) {
            history.push(1, &[7, 8]);
            history.push(0, experts);
        }
        history.expect(0, &mut expected);
        assert!(expected[3] > 0.9 && expected[69] > 0.9, "{expected:?}");
        assert!(expected[1] < 0.1 && expected[4] < 0.1, "{expected:?}");
    }
}
