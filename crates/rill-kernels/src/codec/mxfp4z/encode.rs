//! From MXFP4 to the entropy-coded form. Integers only, so that every machine makes the same bytes.

use super::format::{Alphabet, check_shape};
use super::*;
use crate::codec::Codec;
use crate::matrix::Matrix;

/// Bits after the binary point of [`LOG2`].
const LOG2_BITS: u32 = 24;
/// log2 of 1 to 128, rounded down; 0 for 0.
const LOG2: [u64; SLOTS + 1] = {
    let mut table = [0; SLOTS + 1];
    let mut n = 1;
    while n < table.len() {
        table[n] = log2(n as u64);
        n += 1;
    }
    table
};

impl Mxfp4zMatrix<'_> {
    /// Packs an MXFP4 matrix, without loss but for the sign of zeros; the bytes are what [`new`](Self::new) takes.
    ///
    /// # Errors
    /// When `source` is not MXFP4, or too large for a directory of 32-bit words.
    pub fn encode(source: &Matrix<'_>) -> Result<Vec<u8>, LayoutError> {
        if source.codec() != Codec::Mxfp4 {
            return Err(refused("only MXFP4 matrices become mxfp4z matrices"));
        }
        let (rows, cols) = (source.rows(), source.cols());
        check_shape(rows, cols)?;
        let coder = Coder::new(source);
        let mut out = coder.header();
        let directory = out.len();
        let tiles = rows.div_ceil(TILE);
        out.resize(directory + 4 * tiles, 0);
        let streams = out.len();
        let mut words = vec![];
        for tile in 0..tiles {
            coder.tile(source, tile, &mut words, &mut out);
            let end = u32::try_from((out.len() - streams) / 2);
            let end = end.map_err(|_| LayoutError::TooLarge { rows, cols })?;
            out[directory + 4 * tile..][..4].copy_from_slice(&end.to_le_bytes());
        }
        out.resize(out.len() + SLACK, 0);
        Ok(out)
    }
}

/// How often each nibble occurs, by the exponent of its block.
pub(super) struct Counts(pub(super) Vec<[u64; SYMBOLS]>);

impl Counts {
    pub(super) fn new() -> Self {
        Self(vec![[0; SYMBOLS]; 256])
    }

    /// Counts a nibble of a block.
    pub(super) fn add(&mut self, e: u8, nibble: u8) {
        self.0[usize::from(e)][usize::from(merged(nibble))] += 1;
    }
}

/// What a matrix's symbols are, and their frequencies.
pub(super) struct Coder {
    /// Different exponents, ascending, unless there are too many.
    palette: Option<Vec<u8>>,
    /// First symbol of every exponent.
    upper: [u8; 256],
    split: u8,
    exponents: Alphabet,
    lower: Option<Alphabet>,
    nibbles: [Alphabet; 2],
}

impl Coder {
    fn new(source: &Matrix<'_>) -> Self {
        let mut counts = Counts::new();
        let blocks = source.codes.as_chunks::<{ BLOCK / 2 }>().0;
        for (codes, &e) in blocks.iter().zip(source.scales) {
            for code in codes {
                counts.add(e, code & 15);
                counts.add(e, code >> 4);
            }
        }
        Self::of(&counts)
    }

    /// For blocks of which `counts` are whole ones.
    pub(super) fn of(Counts(counts): &Counts) -> Self {
        let blocks_of = |e: usize| counts[e].iter().sum::<u64>() / BLOCK as u64;
        let used: Vec<u8> = (0..=255).filter(|&e| blocks_of(usize::from(e)) > 0).collect();
        let palette = if used.len() <= SYMBOLS { Some(used) } else { None };
        let mut upper: [u8; 256] = std::array::from_fn(|e| (e / 16) as u8);
        for (i, &e) in palette.iter().flatten().enumerate() {
            upper[usize::from(e)] = i as u8;
        }
        let (mut of_upper, mut of_lower) = ([0; SYMBOLS], [0; SYMBOLS]);
        let mut by_upper = [[0; SYMBOLS]; SYMBOLS];
        for (e, counts) in counts.iter().enumerate() {
            let i = usize::from(upper[e]);
            of_upper[i] += blocks_of(e);
            of_lower[e % 16] += blocks_of(e);
            add(&mut by_upper[i], counts);
        }
        // The split that takes least; the first of equals, which is none.
        let tables = |split: usize| {
            let mut counts = [[0; SYMBOLS]; 2];
            for (i, more) in by_upper.iter().enumerate() {
                add(&mut counts[usize::from(i >= split)], more);
            }
            let alphabets = counts.map(|counts| frequencies(&counts));
            let cost = bits(&counts[0], &alphabets[0]) + bits(&counts[1], &alphabets[1]);
            (cost, split, alphabets)
        };
        let best = (1..=SYMBOLS).rev().map(tables).min_by_key(|(cost, ..)| *cost);
        let (_, split, nibbles) = best.expect("there are splits to choose from");
        Self {
            upper,
            split: split as u8,
            exponents: alphabet(frequencies(&of_upper)),
            lower: palette.is_none().then(|| alphabet(frequencies(&of_lower))),
            nibbles: nibbles.map(alphabet),
            palette,
        }
    }

    /// Bits that a block's exponent takes; `None` where no block had it.
    pub(super) fn exponent_bits(&self, e: u8) -> Option<f64> {
        if self.palette.as_ref().is_some_and(|palette| !palette.contains(&e)) {
            return None;
        }
        let upper = self.exponents.bits(self.upper[usize::from(e)])?;
        match &self.lower {
            None => Some(upper),
            Some(lower) => Some(upper + lower.bits(e % 16)?),
        }
    }

    /// Bits that a nibble takes in a block with this exponent; `None` where none was like it.
    pub(super) fn nibble_bits(&self, e: u8, nibble: u8) -> Option<f64> {
        self.table(e).bits(merged(nibble))
    }

    /// Of the nibbles of a block.
    fn table(&self, e: u8) -> &Alphabet {
        &self.nibbles[usize::from(self.upper[usize::from(e)] >= self.split)]
    }

    fn header(&self) -> Vec<u8> {
        let mut out = vec![];
        out.extend(self.palette.iter().flatten());
        out.resize(SYMBOLS, out.last().copied().unwrap_or(0));
        out.extend(self.exponents.frequency);
        out.extend(self.lower.as_ref().map_or([0; SYMBOLS], |lower| lower.frequency));
        out.extend(self.nibbles.iter().flat_map(|table| table.frequency));
        out.push(self.split);
        out.resize(HEADER, 0);
        out
    }

    /// Appends a tile. Last symbol and last lane first, so that decoding goes forwards.
    fn tile(&self, source: &Matrix<'_>, tile: usize, words: &mut Vec<u16>, out: &mut Vec<u8>) {
        let rows = tile * TILE..source.rows().min((tile + 1) * TILE);
        let blocks = source.cols() / BLOCK;
        let mut states = [0; TILE];
        let states = &mut states[..];
        let lanes = rows.len();
        states[..lanes].fill(LOWEST);
        words.clear();
        for block in (0..blocks).rev() {
            let of = |lane: usize| {
                let number = (rows.start + lane) * blocks + block;
                let e = source.scales[number];
                (&source.codes[number * (BLOCK / 2)..][..BLOCK / 2], e, self.table(e))
            };
            for input in (0..BLOCK / 2).rev() {
                for (lane, state) in states[..lanes].iter_mut().enumerate().rev() {
                    let (codes, _, table) = of(lane);
                    let nibble = |i: usize| merged(codes[i / 2] >> (i % 2 * 4) & 15);
                    let pair = [(table, nibble(input)), (table, nibble(BLOCK / 2 + input))];
                    write(&pair, state, words);
                }
            }
            for (lane, state) in states[..lanes].iter_mut().enumerate().rev() {
                let e = of(lane).1;
                let upper = (&self.exponents, self.upper[usize::from(e)]);
                match &self.lower {
                    None => write(&[upper], state, words),
                    Some(lower) => write(&[upper, (lower, e % 16)], state, words),
                }
            }
        }
        out.extend(states.iter().flat_map(|state| state.to_le_bytes()));
        out.extend(words.iter().rev().flat_map(|word| word.to_le_bytes()));
    }
}

impl Alphabet {
    /// Bits that a symbol takes; `None` where it does not occur.
    fn bits(&self, symbol: u8) -> Option<f64> {
        let frequency = self.frequency[usize::from(symbol)];
        let bits = LOG2[SLOTS] - LOG2[usize::from(frequency)];
        (frequency > 0).then_some(bits as f64 / f64::from(1 << LOG2_BITS))
    }
}

/// +0 for −0.
pub(super) fn merged(nibble: u8) -> u8 {
    if nibble == 8 { 0 } else { nibble }
}

/// Undoes reading symbols, two at most, and the word that may come in after them.
fn write(symbols: &[(&Alphabet, u8)], state: &mut u32, words: &mut Vec<u16>) {
    let of = |list: &[u8; SYMBOLS], symbol: u8| u32::from(list[usize::from(symbol)]);
    // States below `end · 2^16` become ones below 2^32, those from `end` on ones from 2^16 on.
    let frequencies = symbols.iter().map(|&(table, symbol)| of(&table.frequency, symbol));
    let end = frequencies.product::<u32>() << (16 - SLOT_BITS * symbols.len() as u32);
    if u64::from(*state) >= u64::from(end) << 16 {
        words.push(*state as u16);
        *state >>= 16;
    }
    for &(table, symbol) in symbols.iter().rev() {
        let (frequency, first) = (of(&table.frequency, symbol), of(&table.first, symbol));
        *state = (*state / frequency) << SLOT_BITS | (*state % frequency + first);
    }
}

/// The frequencies, 1 at least for every symbol that occurs, with which `counts` take the fewest bits: every slot goes to the
/// symbol that gains most by it, the first of equals.
fn frequencies(counts: &[u64; SYMBOLS]) -> [u8; SYMBOLS] {
    let mut out = counts.map(|n| u8::from(n > 0));
    let used: u8 = out.iter().sum();
    if used == 0 {
        out[0] = SLOTS as u8;
        return out;
    }
    for _ in usize::from(used)..SLOTS {
        let mut best = (0, 0);
        for (symbol, (&n, &f)) in counts.iter().zip(&out).enumerate() {
            let f = usize::from(f);
            // Counts are below 2^60, logarithms below 2^28.
            let gain = u128::from(n) * u128::from(LOG2[f + 1] - LOG2[f]);
            if n > 0 && gain > best.0 {
                best = (gain, symbol);
            }
        }
        out[best.1] += 1;
    }
    out
}

/// What symbols take, in units of 2^−24 bits.
fn bits(counts: &[u64; SYMBOLS], frequencies: &[u8; SYMBOLS]) -> u128 {
    let all = counts.iter().zip(frequencies);
    all.map(|(&n, &f)| u128::from(n) * u128::from(LOG2[SLOTS] - LOG2[usize::from(f)])).sum()
}

fn alphabet(frequencies: [u8; SYMBOLS]) -> Alphabet {
    Alphabet::new(frequencies).expect("frequencies add up to all slots")
}

fn add(counts: &mut [u64; SYMBOLS], more: &[u64; SYMBOLS]) {
    for (n, more) in counts.iter_mut().zip(more) {
        *n += more;
    }
}

/// log2 by repeated squaring, of n from 1 to 2^31.
const fn log2(n: u64) -> u64 {
    let whole = n.ilog2();
    // n / 2^whole, from 1 to 2, with 31 bits after the binary point.
    let mut x = n << (31 - whole);
    let mut out = whole as u64;
    let mut bit = 0;
    while bit < LOG2_BITS {
        x = (x * x) >> 31;
        let doubled = x >> 32;
        x >>= doubled;
        out = out << 1 | doubled;
        bit += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_those_of_binary64() {
        for (n, &found) in LOG2.iter().enumerate().skip(1) {
            let wanted = (n as f64).log2() * f64::from(1 << LOG2_BITS);
            assert!((found as f64 - wanted).abs() < 2.0, "{n}: {found}, {wanted}");
        }
    }

    #[test]
    fn frequencies_are_the_best_of_all_their_neighbours() {
        let counts =
            [26591, 24975, 21948, 17514, 17473, 12181, 5787, 1, 0, 25754, 1, 2, 3, 4, 9, 90000];
        let found = frequencies(&counts);
        assert_eq!(found.iter().map(|&f| usize::from(f)).sum::<usize>(), SLOTS);
        let least = bits(&counts, &found);
        for from in 0..SYMBOLS {
            for to in 0..SYMBOLS {
                let mut other = found;
                if other[from] > 1 && counts[to] > 0 && from != to {
                    (other[from], other[to]) = (other[from] - 1, other[to] + 1);
                    assert!(bits(&counts, &other) >= least, "{from} {to}");
                }
            }
        }
    }
}
