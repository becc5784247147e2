//! From MXFP4 rows to the trellis format's native profile, and from rows of any format to the rotated one. Row
//! by row, in integers, or before those in f64 with every operation rounded by itself: any split of the rows
//! over threads, and any CPU, gives the same bytes.

use super::format::{is_negative, magnitude};
use super::viterbi::{Costs, Scratch, Search, Stepper, Target};
use super::*;
use crate::codec::{Codec, mxfp4};
use crate::matrix::Matrix;

/// Twice the value of a nibble.
const DOUBLED: [i32; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Quantiles of the standard normal distribution at (i + 32½)/64, thousandths.
#[rustfmt::skip]
const QUANTILES: [i64; MAGNITUDES] = [
    20, 59, 98, 138, 177, 217, 257, 298, 339, 381, 424, 467, 511, 556, 602, 650,
    699, 750, 803, 858, 917, 978, 1043, 1113, 1189, 1273, 1366, 1473, 1601, 1762, 1987, 2418,
];

/// Units of table bytes in a rotated row's root mean square: tables reach 4 of those.
const RMS: i64 = 16;

/// Turns matrices into trellis matrices: MXFP4 ones into those of the native profile, any into rotated ones.
pub struct TrellisEncoder {
    trellis: Trellis,
    tables: TrellisTables,
    split: u32,
    search: Search,
}

impl TrellisEncoder {
    /// An encoder with given tables. Blocks whose squared nibbles, each doubled first, add up to more
    /// than `split` are of class 1; the median over a tensor is best. The rotated profile has one class.
    pub fn new(trellis: Trellis, tables: TrellisTables, split: u32) -> Self {
        Self::with(trellis, tables, split, Stepper::fastest())
    }

    /// Every encoder this CPU can run, the specification first; all make the same bytes.
    pub fn all(trellis: Trellis, tables: &TrellisTables, split: u32) -> Vec<Self> {
        let with = |stepper| Self::with(trellis, *tables, split, stepper);
        Stepper::all().into_iter().map(with).collect()
    }

    fn with(trellis: Trellis, tables: TrellisTables, split: u32, stepper: Stepper) -> Self {
        let search = Search::new(trellis, &costs(trellis, &tables), stepper);
        Self { trellis, tables, split, search }
    }

    /// Short name of the code that searches, for reports.
    pub fn name(&self) -> &'static str {
        self.search.name()
    }

    /// The tables that matrices made by this encoder refer to.
    pub fn tables(&self) -> &TrellisTables {
        &self.tables
    }

    /// Sum of doubled, squared nibbles up to which a block is of class 0.
    pub fn split(&self) -> u32 {
        self.split
    }

    /// Packs a matrix, or any whole tiles of one: `codes` and `sides` have the layout's bytes for
    /// `source`. Tiles are independent, so that threads may split them.
    ///
    /// # Errors
    /// When `source` is not MXFP4 and the profile is the native one, is too large, or has a weight that is not
    /// finite.
    ///
    /// # Panics
    /// When the lengths are not those of the layout.
    pub fn encode(
        &self,
        source: &Matrix<'_>,
        codes: &mut [u8],
        sides: &mut [u8],
    ) -> Result<(), LayoutError> {
        check_source(self.trellis, source)?;
        let (rows, cols) = (source.rows(), source.cols());
        let layout = self.trellis.layout(rows, cols)?;
        assert_eq!((codes.len(), sides.len()), (layout.codes, layout.scales));
        codes.fill(0);
        sides.fill(0);
        let (tile_bytes, side_bytes) =
            (self.trellis.tile_bytes(cols), self.trellis.side_bytes(cols));
        let mut scratch = Scratch::default();
        for row in 0..rows {
            let (scale, target) = if self.trellis.rotated {
                rotated_target(source, row)?
            } else {
                let (exponent, target) = target(source, row, self.split);
                (mxfp4::scale(exponent) / 10.0, target)
            };
            self.search.row(&target, &mut scratch);
            let (tile, lane) = (row / TILE, row % TILE);
            let lines = &mut codes[tile * tile_bytes..][..tile_bytes];
            self.put_stream(lines, lane, &scratch.found, scale);
            if self.trellis.rotated {
                continue;
            }
            let sides = &mut sides[tile * side_bytes..][..side_bytes];
            for (block, side) in target.sides.iter().enumerate() {
                sides[block / 2 * TILE + lane] |= side << (block % 2 * 4);
            }
        }
        Ok(())
    }

    /// Writes the windows that `found` are the lowest bits of, and the row's scale, into a lane that is
    /// zero.
    fn put_stream(&self, lines: &mut [u8], lane: usize, found: &[u16], scale: f32) {
        let mut put = |bit: usize, bits: u64| {
            for (line, part) in
                [bits << (bit % 64), (bits >> 1) >> (63 - bit % 64)].iter().enumerate()
            {
                if *part != 0 {
                    let at = (bit / 64 + line) * LINE + lane * 8;
                    let word: &mut [u8; 8] = lines[at..].first_chunk_mut().expect("a whole line");
                    *word = (u64::from_le_bytes(*word) | part).to_le_bytes();
                }
            }
        };
        // Windows overlap and agree where they do.
        for (col, &state) in found.iter().enumerate() {
            put(self.trellis.first_bit(col), u64::from(state));
        }
        put(self.trellis.lines(found.len()) * 64 - SCALE, u64::from(scale.to_bits()));
    }

    /// An encoder whose tables are made for `sample`, rows of the matrices to come: class by class they
    /// start at the quantiles of the weights (rotated: of the normal distribution), shrunk by what the rate
    /// cannot express (rotated: stretched), and five times move to the means of the weights that the search
    /// gives to them.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn train(trellis: Trellis, sample: &Matrix<'_>) -> Result<Self, LayoutError> {
        check_source(trellis, sample)?;
        trellis.layout(sample.rows(), sample.cols())?;
        let rows = || 0..sample.rows();
        if trellis.rotated {
            let mut targets = vec![];
            for row in rows() {
                let (scale, target) = rotated_target(sample, row)?;
                // Rows of zeros say nothing.
                if scale > 0.0 {
                    targets.push((0, target));
                }
            }
            let tables = centroids(trellis, rotated_tables(trellis), &targets);
            return Ok(Self::new(trellis, tables, 0));
        }
        let mut energies: Vec<u32> = rows()
            .flat_map(|row| blocks(sample, row).1.into_iter().map(|b| energy(&b.nibbles)))
            .collect();
        energies.sort_unstable();
        let split = energies.get(energies.len().saturating_sub(1) / 2).copied().unwrap_or(0);
        let targets: Vec<(u8, Target)> = rows().map(|row| target(sample, row, split)).collect();
        let tables = centroids(trellis, first_tables(trellis, &targets), &targets);
        Ok(Self::new(trellis, tables, split))
    }
}

impl std::fmt::Debug for TrellisEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrellisEncoder").field("trellis", &self.trellis).finish_non_exhaustive()
    }
}

fn check_source(trellis: Trellis, source: &Matrix<'_>) -> Result<(), LayoutError> {
    if trellis.rotated || source.codec() == Codec::Mxfp4 {
        return Ok(());
    }
    Err(LayoutError::Trellis("only MXFP4 matrices become trellis matrices of the native profile"))
}

/// Five times moves the weights of tables to the means of those that the search gives to them. Each target
/// has its row's exponent.
fn centroids(
    trellis: Trellis,
    mut tables: TrellisTables,
    targets: &[(u8, Target)],
) -> TrellisTables {
    let top = targets.iter().map(|t| t.0).max().unwrap_or(0);
    let mut scratch = Scratch::default();
    for _ in 0..5 {
        let search = Search::new(trellis, &costs(trellis, &tables), Stepper::fastest());
        // Of each class and magnitude: sums of weight · doubled value, and of weights.
        let mut sums = [[(0i64, 0i64); MAGNITUDES]; CLASSES];
        for (exponent, target) in targets {
            search.row(target, &mut scratch);
            for (col, (&level, &state)) in target.levels.iter().zip(&scratch.found).enumerate() {
                // A square of the block's power of two; what is 2^−10 of the largest has no say.
                let delta = top - exponent + (target.sides[col / BLOCK] & MAX_DELTA);
                let Some(left) = 10u8.checked_sub(delta) else { continue };
                let weight = 1i64 << (2 * left);
                let (class, doubled) = wanted(trellis, usize::from(level));
                let entry = trellis.entry(state);
                let sum = &mut sums[class][magnitude(entry)];
                let doubled = if is_negative(entry) { -doubled } else { doubled };
                sum.0 += weight * i64::from(doubled);
                sum.1 += weight;
            }
        }
        for (sums, table) in sums.iter().zip(&mut tables.magnitudes) {
            // The first is 0 and stays so.
            for (&(sum, weight), byte) in sums.iter().zip(table).skip(1) {
                if weight > 0 {
                    // Half the mean, rounded, halves upwards.
                    *byte = table_byte((sum + weight).div_euclid(2 * weight));
                }
            }
        }
    }
    tables
}

/// Class of a level, and twice its weight in units of a table's bytes.
fn wanted(trellis: Trellis, level: usize) -> (usize, i32) {
    if trellis.rotated { (0, level as i32 - 128) } else { (level / 16, 10 * DOUBLED[level % 16]) }
}

/// Scale and target of a row of the rotated profile.
fn rotated_target(source: &Matrix<'_>, row: usize) -> Result<(f32, Target), LayoutError> {
    let cols = source.cols();
    let mut weights = vec![0.0; cols];
    source.decode_row(row, &mut weights);
    if let Some(input) = weights.iter().position(|w| !w.is_finite()) {
        return Err(LayoutError::Weight { row, input, weight: weights[input] });
    }
    let mut weights: Vec<f64> = weights.into_iter().map(f64::from).collect();
    rotation::rotate_f64(&mut weights);
    // In the order of the inputs; of no inputs NaN, which the comparison below takes for zero.
    let squares = weights.iter().fold(0.0, |sum, w| sum + w * w);
    let scale = ((squares / cols as f64).sqrt() / RMS as f64) as f32;
    let doubled = if scale > 0.0 { 2.0 / f64::from(scale) } else { 0.0 };
    let level = |w: &f64| ((w * doubled).round_ties_even().clamp(-128.0, 127.0) + 128.0) as u8;
    let levels = weights.iter().map(level).collect();
    Ok((scale.max(0.0), Target { levels, sides: vec![0; cols / BLOCK] }))
}

/// The quantiles of normally distributed magnitudes times 1.04 at the lowest rate to 1.23 at the highest: the finer
/// the rate, the more of its entries should be where weights are few, and centroids hardly move there.
fn rotated_tables(trellis: Trellis) -> TrellisTables {
    let stretched = RMS * (1040 + 12 * (trellis.rate as i64 - 16));
    let mut first = QUANTILES.map(|q| table_byte((q * stretched + 500_000) / 1_000_000));
    first[0] = 0;
    TrellisTables { magnitudes: [first, [0; MAGNITUDES]] }
}

/// A block of a row, in units of the row's largest power of two times 2^−delta.
struct Block {
    nibbles: [u8; BLOCK],
    delta: u8,
}

/// The largest exponent of a row and its blocks. Blocks of zeros do not count for the exponent and get the
/// largest delta, at which what a table has for 0 errs least.
fn blocks(source: &Matrix<'_>, row: usize) -> (u8, Vec<Block>) {
    let row = source.row_range(row..row + 1);
    let nibbles = row.codes.as_chunks::<{ BLOCK / 2 }>().0.iter().map(|bytes| {
        let nibbles: [u8; BLOCK] = std::array::from_fn(|i| bytes[i / 2] >> (i % 2 * 4) & 15);
        // A zero with a sign is a zero.
        nibbles.map(|n| if n == 8 { 0 } else { n })
    });
    let all: Vec<([u8; BLOCK], u8)> = nibbles.zip(row.scales.iter().copied()).collect();
    let is_zero = |nibbles: &[u8; BLOCK]| nibbles.iter().all(|&n| n == 0);
    let exponents = all.iter().filter(|(nibbles, _)| !is_zero(nibbles)).map(|&(_, e)| e);
    let top = exponents.max().unwrap_or(0);
    let block = |(nibbles, e): ([u8; BLOCK], u8)| {
        if is_zero(&nibbles) {
            return Block { nibbles, delta: MAX_DELTA };
        }
        let (delta, below) = ((top - e).min(MAX_DELTA), (top - e).saturating_sub(MAX_DELTA));
        Block { nibbles: nibbles.map(|n| halved(n, below)), delta }
    };
    (top, all.into_iter().map(block).collect())
}

/// The nibble nearest to another one times 2^−by, the smaller one of two.
fn halved(nibble: u8, by: u8) -> u8 {
    let (sign, doubled) = (nibble & 8, DOUBLED[usize::from(nibble & 7)]);
    let distance = |n: u8| ((DOUBLED[usize::from(n)] << by.min(16)) - doubled).abs();
    match (0..8).min_by_key(|&n| distance(n)) {
        None | Some(0) => 0,
        Some(magnitude) => sign | magnitude,
    }
}

/// Sum of doubled, squared values.
fn energy(nibbles: &[u8; BLOCK]) -> u32 {
    nibbles.iter().map(|&n| DOUBLED[usize::from(n)].pow(2) as u32).sum()
}

/// Exponent and target of a row.
fn target(source: &Matrix<'_>, row: usize, split: u32) -> (u8, Target) {
    let (exponent, blocks) = blocks(source, row);
    let (mut levels, mut sides) = (Vec::with_capacity(source.cols()), vec![]);
    for block in blocks {
        let class = u8::from(energy(&block.nibbles) > split);
        sides.push(class << 3 | block.delta);
        levels.extend(block.nibbles.map(|n| class << 4 | n));
    }
    (exponent, Target { levels, sides })
}

/// Per class the quantiles of the magnitudes times √(1 − 4^(−rate/8)).
fn first_tables(trellis: Trellis, targets: &[(u8, Target)]) -> TrellisTables {
    // Thousandths, for 16 to 28 bits per 8 inputs.
    const SHRUNK: [i64; 13] = [968, 973, 978, 981, 984, 987, 989, 991, 992, 993, 994, 995, 996];
    let shrunk = SHRUNK[trellis.rate - 16];
    let mut counts = [[0i64; 8]; CLASSES];
    for level in targets.iter().flat_map(|(_, target)| &target.levels) {
        counts[usize::from(level >> 4)][usize::from(level & 7)] += 1;
    }
    let magnitudes = counts.map(|counts| {
        let all: i64 = counts.iter().sum();
        std::array::from_fn(|i| {
            if i == 0 {
                return 0;
            }
            // The first magnitude with more than (i + ½)/32 of all weights up to it.
            let mut up_to = 0;
            let value = (0..8).find(|&n| {
                up_to += counts[n];
                ENTRIES as i64 * up_to > (2 * i as i64 + 1) * all
            });
            let tenths = 5 * i64::from(value.map_or(0, |n| DOUBLED[n]));
            table_byte((2 * tenths * shrunk + 1000).div_euclid(2000))
        })
    });
    TrellisTables { magnitudes }
}

/// The byte of a magnitude in tenths.
fn table_byte(tenths: i64) -> u8 {
    tenths.clamp(0, i64::from(LARGEST)) as u8
}

/// `min(255, round(α (wanted − entry)²))` for every level and entry, differences in units of the block's power of
/// two, or of a rotated row's root mean square.
fn costs(trellis: Trellis, tables: &TrellisTables) -> Vec<Costs> {
    // The finer the rate, the smaller the errors, and the finer they must be told apart. Half as much
    // again, or a third less, changes errors by less than 0.5 %.
    const ALPHA: [i32; 13] = [5, 6, 8, 8, 8, 9, 10, 10, 12, 16, 20, 25, 30];
    let (levels, alpha, unit) = if trellis.rotated {
        (256, 30 + 8 * (trellis.rate as i32 - 16), RMS as i32)
    } else {
        (32, ALPHA[trellis.rate - 16], 10)
    };
    let of_level = |level: usize| {
        let (class, doubled) = wanted(trellis, level);
        std::array::from_fn(|entry| {
            let lost = doubled - 2 * i32::from(tables.units(class, entry as u8));
            ((alpha * lost * lost + 2 * unit * unit) / (4 * unit * unit)).min(255) as u8
        })
    };
    (0..levels).map(of_level).collect()
}
