//! MXFP4 that takes fewer bits when it is entropy-coded, for a little of its exactness.
//!
//! What helps is not leaving out levels of all blocks, but raising some blocks by a power of two: those lose the levels ½ and 1½
//! and take a bit a weight less, and the blocks that lose least by it are chosen. So weights keep or change their
//! nibbles, and blocks their exponents, as `lost² + λ · bits` is least, bits being those of frequencies that were made for what
//! had been chosen before, and λ such that as many bits come out as are wanted.
//!
//! In f64, every operation rounded by itself and in the order of the inputs: any CPU makes the same bytes.

use super::encode::{Coder, Counts, merged};
use super::*;
use crate::codec::{Codec, mxfp4};
use crate::matrix::Matrix;

/// Weights that frequencies and λ are made for, in whole rows from all over the matrix.
const SAMPLE_WEIGHTS: usize = 1 << 16;
/// How often λ and frequencies are made for each other; they hardly move in the end.
const PASSES: usize = 8;
/// Halvings of the range of λ.
const HALVINGS: usize = 24;

/// Nibbles of a block, and its exponent.
type Block = ([u8; BLOCK], u8);

impl Mxfp4zMatrix<'_> {
    /// Codes and scales of an MXFP4 matrix near `source` that [`encode`](Self::encode) packs in about
    /// `hundredths` / 100 bits a weight, headers and tables not counted; what takes no more as it is stays
    /// as it is but for the sign of zeros.
    ///
    /// # Errors
    /// When `source` is not MXFP4.
    pub fn thinned(
        source: &Matrix<'_>,
        hundredths: u16,
    ) -> Result<(Vec<u8>, Vec<u8>), LayoutError> {
        if source.codec() != Codec::Mxfp4 {
            return Err(refused("only MXFP4 matrices become mxfp4z matrices"));
        }
        let (rows, cols) = (source.rows(), source.cols());
        let n = SAMPLE_WEIGHTS.div_ceil(cols.max(1)).min(rows);
        let sample: Vec<Block> = (0..n).flat_map(|i| blocks(source, i * rows / n)).collect();
        let ways = Ways::new(&sample, f64::from(hundredths) / 100.0 * BLOCK as f64);
        let mut codes = Vec::with_capacity(rows * cols / 2);
        let mut scales = Vec::with_capacity(rows * cols / BLOCK);
        for (nibbles, e) in (0..rows).flat_map(|row| blocks(source, row)) {
            let way = ways.best(&nibbles, e);
            let nibble = |i: usize| way.nibbles[usize::from(nibbles[i])];
            codes.extend((0..BLOCK / 2).map(|i| nibble(2 * i) | nibble(2 * i + 1) << 4));
            scales.push(way.exponent);
        }
        Ok((codes, scales))
    }
}

/// The blocks of a row, without negative zeros.
fn blocks<'a>(source: &Matrix<'a>, row: usize) -> impl Iterator<Item = Block> + use<'a> {
    let row = source.row_range(row..row + 1);
    let (codes, scales) = (row.codes.as_chunks::<{ BLOCK / 2 }>().0, row.scales);
    let nibble = |codes: &[u8; BLOCK / 2], i: usize| merged(codes[i / 2] >> (i % 2 * 4) & 15);
    codes.iter().zip(scales).map(move |(codes, &e)| (std::array::from_fn(|i| nibble(codes, i)), e))
}

/// One way to write the blocks of one exponent.
#[derive(Clone, Copy)]
struct Way {
    exponent: u8,
    /// What each nibble becomes.
    nibbles: [u8; SYMBOLS],
    /// Bits of the exponent and of each nibble.
    exponent_bits: f64,
    bits: [f64; SYMBOLS],
    /// λ times these, and what is lost. Infinite where frequencies do not allow the exponent.
    exponent_cost: f64,
    costs: [f64; SYMBOLS],
}

/// As it is and raised, by exponent. What the sample did not have stays as it is.
struct Ways(Vec<[Way; 2]>);

impl Ways {
    /// Ways by which the blocks of `sample` take `bits` on average.
    fn new(sample: &[Block], bits: f64) -> Self {
        let is_used = |e: &u8| sample.iter().any(|(_, used)| used == e);
        let used: Vec<u8> = (0..=255).filter(is_used).collect();
        let top = used.last().copied().unwrap_or(0);
        let mut counts = Counts::new();
        sample.iter().for_each(|(nibbles, e)| Way::as_is(*e).count(nibbles, &mut counts));
        if Self::of(Some(&Coder::of(&counts)), &used, 0.0).mean_bits(sample) <= bits {
            return Self::of(None, &[], 0.0);
        }
        // At first as if a third of all blocks were raised, whichever.
        let mut ways = Self::of(None, &used, 0.0);
        counts = Counts::new();
        for (nibbles, e) in sample {
            let [as_is, raised] = &ways.0[usize::from(*e)];
            for way in [as_is, as_is, raised] {
                way.count(nibbles, &mut counts);
            }
        }
        // A bit is not worth more than all that a block has.
        let squares = |(nibbles, e): &Block| {
            let square = |&n: &u8| (f64::from(doubled(n)) * unit(*e, top)).powi(2);
            nibbles.iter().map(square).sum::<f64>()
        };
        let most = sample.iter().map(squares).sum::<f64>() / sample.len().max(1) as f64;
        for _ in 0..PASSES {
            let coder = Coder::of(&counts);
            let (mut low, mut high) = (0.0, most);
            ways = Self::of(Some(&coder), &used, low);
            if ways.mean_bits(sample) > bits {
                for _ in 0..HALVINGS {
                    let middle = (low + high) / 2.0;
                    ways = Self::of(Some(&coder), &used, middle);
                    let end = if ways.mean_bits(sample) > bits { &mut low } else { &mut high };
                    *end = middle;
                }
                ways = Self::of(Some(&coder), &used, high);
            }
            counts = Counts::new();
            sample
                .iter()
                .for_each(|(nibbles, e)| ways.best(nibbles, *e).count(nibbles, &mut counts));
        }
        ways
    }

    /// The cheapest ways for the exponents that are used, ascending; without a coder, the nearest ones.
    fn of(coder: Option<&Coder>, used: &[u8], lambda: f64) -> Self {
        let mut ways: Vec<[Way; 2]> = (0..=255).map(|e| [Way::as_is(e); 2]).collect();
        let top = used.last().copied().unwrap_or(0);
        for &e in used {
            // 255 would be NaN.
            let raised = if e < 254 { e + 1 } else { e };
            ways[usize::from(e)] =
                [e, raised].map(|to| Way::new(coder, e, to, unit(e, top), lambda));
        }
        Self(ways)
    }

    /// The cheaper way of a block, as it is where both cost the same.
    fn best(&self, nibbles: &[u8; BLOCK], e: u8) -> &Way {
        let [as_is, raised] = &self.0[usize::from(e)];
        if raised.cost(nibbles) < as_is.cost(nibbles) { raised } else { as_is }
    }

    /// Bits that a block takes on average.
    fn mean_bits(&self, sample: &[Block]) -> f64 {
        let bits = |(nibbles, e): &Block| {
            let way = self.best(nibbles, *e);
            nibbles.iter().fold(way.exponent_bits, |sum, &n| sum + way.bits[usize::from(n)])
        };
        sample.iter().map(bits).sum::<f64>() / sample.len().max(1) as f64
    }
}

impl Way {
    fn as_is(exponent: u8) -> Self {
        Self {
            exponent,
            nibbles: std::array::from_fn(|n| merged(n as u8)),
            exponent_bits: 0.0,
            bits: [0.0; SYMBOLS],
            exponent_cost: 0.0,
            costs: [0.0; SYMBOLS],
        }
    }

    /// From exponent `e`, whose power of two is `unit`, to `exponent`, the same or the next.
    fn new(coder: Option<&Coder>, e: u8, exponent: u8, unit: f64, lambda: f64) -> Self {
        let mut way = Self::as_is(exponent);
        match coder.map_or(Some(0.0), |coder| coder.exponent_bits(exponent)) {
            None => {
                way.exponent_cost = f64::INFINITY;
                return way;
            }
            Some(bits) => (way.exponent_bits, way.exponent_cost) = (bits, lambda * bits),
        }
        for nibble in 0..SYMBOLS {
            let becomes = |to: u8| {
                let bits = coder.map_or(Some(0.0), |coder| coder.nibble_bits(exponent, to))?;
                let lost = doubled(nibble as u8) - (doubled(to) << (exponent - e));
                let lost = f64::from(lost) * unit;
                Some((lost * lost + lambda * bits, bits, to))
            };
            // Without −0, which a coder does not tell from +0.
            let all = (0..SYMBOLS as u8).filter(|&to| merged(to) == to).filter_map(becomes);
            if let Some(least) = all.min_by(|a, b| a.0.total_cmp(&b.0)) {
                (way.costs[nibble], way.bits[nibble], way.nibbles[nibble]) = least;
            }
        }
        way
    }

    fn cost(&self, nibbles: &[u8; BLOCK]) -> f64 {
        nibbles.iter().fold(self.exponent_cost, |sum, &n| sum + self.costs[usize::from(n)])
    }

    /// Counts what a block becomes.
    fn count(&self, nibbles: &[u8; BLOCK], counts: &mut Counts) {
        nibbles.iter().for_each(|&n| counts.add(self.exponent, self.nibbles[usize::from(n)]));
    }
}

/// Twice the value of a nibble.
fn doubled(nibble: u8) -> i32 {
    (2.0 * mxfp4::VALUES[usize::from(nibble)]) as i32
}

/// 2^(e − top): exact, and so are squares of it.
fn unit(e: u8, top: u8) -> f64 {
    f64::from_bits((1023 + u64::from(e) - u64::from(top)) << 52)
}
