//! Random trellis matrices: any bits are a row's codes, so only what is not code is put in.

use rill_kernels::{Codec, Trellis};

use super::noise::{Noise, word, words};

/// Rows of a tile, whose lines have a word of each.
const TILE: usize = 8;
const LINE_BYTES: usize = 8 * TILE;
/// Magnitudes of a table: the even numbers from 0 to 62.
const MAGNITUDES: usize = 32;
/// Root mean square of the weights that they mean.
const TABLE_SIZE: f32 = 36.30;
/// The same of a block's power of two, which is 1 or 1/2.
const SIDE_SIZE: f32 = 0.7906;

/// Fills in codes from byte `start` of them, of a matrix whose weights are of this size: random lines,
/// with zeros behind the last window of a row, and a scale at the end.
pub(super) fn codes(noise: &Noise, trellis: Trellis, size: f32, start: u64, out: &mut [u8]) {
    words(noise.key, start, out, |w| w);
    let lines = lines(noise, trellis);
    let tile_bytes = lines * LINE_BYTES;
    let sides = if trellis.is_rotated() { 1.0 } else { SIDE_SIZE };
    let scale = size / (TABLE_SIZE * sides);
    // Of the last window.
    let end_bit = noise.fan_in / 8 * trellis.rate() + 16;
    for tile in tiles(noise, tile_bytes, start, out.len()) {
        let rows = TILE.min(noise.rows - tile * TILE);
        // No more than the last two lines are not full; missing rows have none that is.
        let first = if rows < TILE { 0 } else { lines.saturating_sub(2) };
        for (line, lane) in (first..lines).flat_map(|line| (0..TILE).map(move |lane| (line, lane)))
        {
            let at = (tile * tile_bytes + line * LINE_BYTES + lane * 8) as u64;
            let random = word(noise.key, at / 8);
            let bits = end_bit.saturating_sub(64 * line).min(64) as u32;
            let mut value = random & !u64::MAX.checked_shl(bits).unwrap_or(0);
            if line == lines - 1 {
                // Of either sign, by a bit that is no code.
                let sign = if random >> 63 == 1 { -scale } else { scale };
                value |= u64::from(sign.to_bits()) << 32;
            }
            put(if lane < rows { value } else { 0 }, at, start, out);
        }
    }
}

/// Fills in tables and side nibbles from byte `start` of them: any class, and the row's power of two or half
/// of it.
pub(super) fn scales(noise: &Noise, trellis: Trellis, key: u64, start: u64, out: &mut [u8]) {
    words(key, start, out, |w| w & 0x9999_9999_9999_9999);
    let tables = Codec::Trellis(trellis).table_bytes();
    // Two inputs' worth of 32 to a byte, a byte of each row to a group.
    let groups = noise.fan_in.div_ceil(64);
    let side_bytes = if trellis.is_rotated() { 0 } else { groups * TILE };
    let sides = start.saturating_sub(tables as u64);
    for tile in tiles(noise, side_bytes, sides, out.len()) {
        let rows = TILE.min(noise.rows - tile * TILE);
        let first = if rows < TILE { 0 } else { groups - 1 };
        for group in first..groups {
            let at = (tables + tile * side_bytes + group * TILE) as u64;
            let mut value = word(key, at / 8) & 0x9999_9999_9999_9999;
            if group == groups - 1 && !noise.fan_in.is_multiple_of(64) {
                value &= 0x0f0f_0f0f_0f0f_0f0f;
            }
            let lanes = u64::MAX >> (64 - 8 * rows as u32);
            put(value & lanes, at, start, out);
        }
    }
    // The rotated profile has no second table.
    let classes = if trellis.is_rotated() { 1 } else { 2 };
    for (i, byte) in (start as usize..tables).zip(out) {
        *byte = if i < classes * MAGNITUDES { (2 * (i % MAGNITUDES)) as u8 } else { 0 };
    }
}

/// Lines of a tile.
fn lines(noise: &Noise, trellis: Trellis) -> usize {
    let tile = Codec::Trellis(trellis).layout(TILE, noise.fan_in).expect("planned before");
    tile.codes / LINE_BYTES
}

/// The tiles of which `bytes` bytes from `start` on have some.
fn tiles(noise: &Noise, tile_bytes: usize, start: u64, bytes: usize) -> std::ops::Range<usize> {
    if tile_bytes == 0 {
        return 0..0;
    }
    let all = noise.rows.div_ceil(TILE);
    let first = start as usize / tile_bytes;
    first.min(all)..(start as usize + bytes).div_ceil(tile_bytes).min(all)
}

/// Writes as much of a word for byte `at` as lies in `out`, which begins at `start`.
fn put(value: u64, at: u64, start: u64, out: &mut [u8]) {
    for (at, byte) in (at..).zip(value.to_le_bytes()) {
        let Some(i) = at.checked_sub(start) else { continue };
        if let Some(place) = out.get_mut(i as usize) {
            *place = byte;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::shapes::Values;

    #[test]
    fn what_is_no_code_is_zero_and_missing_rows_are_too() {
        for (trellis, cols) in [
            (Trellis::new(16, 12).unwrap(), 32),
            (Trellis::new(19, 12).unwrap(), 96),
            (Trellis::new(28, 12).unwrap(), 192),
            (Trellis::rotated(29, 12).unwrap(), 224),
        ] {
            for rows in [1, 7, 8, 12, 16] {
                let codec = Codec::Trellis(trellis);
                let values = Values::Matrix(1.0);
                let noise = Noise { codec, key: 11, values, rows, fan_in: cols };
                let layout = codec.layout(rows, cols).unwrap();
                let (mut codes, mut scales) = (vec![0xff; layout.codes], vec![0xff; layout.scales]);
                noise.codes(0, &mut codes);
                noise.scales(0, &mut scales);
                let (tables, sides) = scales.split_at(codec.table_bytes());
                assert_eq!(tables[..2], [0, 2]);
                assert_eq!(tables[63], if trellis.is_rotated() { 0 } else { 62 });
                let tiles = rows.div_ceil(TILE);
                let (tile_words, lines) = (layout.codes / 8 / tiles, layout.codes / 64 / tiles);
                let end = cols / 8 * trellis.rate() + 16;
                for (i, bytes) in codes.as_chunks::<8>().0.iter().enumerate() {
                    let word = u64::from_le_bytes(*bytes);
                    let row = i / tile_words * TILE + i % TILE;
                    let line = i % tile_words / TILE;
                    if row >= rows {
                        assert_eq!(word, 0);
                    } else if line == lines - 1 {
                        let scale = f32::from_bits((word >> 32) as u32);
                        assert!(scale.is_normal(), "{scale}");
                        let codes = (word & 0xffff_ffff).checked_shr((end - 64 * line) as u32);
                        assert_eq!(codes.unwrap_or(0), 0);
                    }
                }
                let groups = sides.len() / 8 / tiles;
                for (i, &byte) in sides.iter().enumerate() {
                    let row = i / (groups * TILE) * TILE + i % TILE;
                    let last = i / TILE % groups == groups - 1 && !cols.is_multiple_of(64);
                    assert_eq!(byte & 0x66, 0);
                    assert!(row < rows || byte == 0);
                    assert!(!last || byte >> 4 == 0);
                }
            }
        }
    }
}
