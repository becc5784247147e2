//! Alphabets as one word for every slot, for kernels that look each up once.

use super::Mxfp4zMatrix;
use super::format::Alphabet;
use super::{SLOTS, SYMBOLS};
use crate::codec::mxfp4;

/// A word by slot, those of table 1 from 128 on: frequency, slot less first slot, and what is read, 16 bits.
pub(super) type Slots = [u32; 2 * SLOTS];

/// The alphabets of a matrix.
pub(super) struct Tables {
    /// With weights, as bf16, which they are exactly.
    pub(super) nibbles: Slots,
    /// With symbols.
    pub(super) exponents: Slots,
    pub(super) lower: Option<Slots>,
}

impl Tables {
    pub(super) fn new(m: &Mxfp4zMatrix<'_>) -> Self {
        let slots = |tables: [&Alphabet; 2], what: &dyn Fn(u8) -> u32| -> Slots {
            std::array::from_fn(|i| {
                let (table, slot) = (tables[i / SLOTS], i % SLOTS);
                let symbol = table.symbol[slot];
                let of = |list: &[u8; SYMBOLS]| u32::from(list[usize::from(symbol)]);
                of(&table.frequency) | (slot as u32 - of(&table.first)) << 8 | what(symbol) << 16
            })
        };
        let [first, second] = &m.nibbles;
        Self {
            nibbles: slots([first, second], &|s| mxfp4::VALUES[usize::from(s)].to_bits() >> 16),
            exponents: slots([&m.exponents; 2], &u32::from),
            lower: m.lower.as_ref().map(|lower| slots([lower; 2], &u32::from)),
        }
    }
}
