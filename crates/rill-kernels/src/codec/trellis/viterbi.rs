//! The cheapest stream of a row: Viterbi's algorithm in bytes, from the last input to the first.
//!
//! A state of an input is the `width` bits of its window that count, of which the lowest `bits` are
//! its own. States that differ only in those lead to the same states of the next input: they are a *group*,
//! numbered by the other bits. For each group the search keeps the cost of the cheapest way on, from the
//! next input to the end of the row, and which of its 2^bits successors that way takes.

use super::{BLOCK, GROUP, Trellis};

/// Costs of entries, by level: what a weight loses that should be the level's.
pub(super) type Costs = [u8; super::ENTRIES];

/// What the search wants of a row.
pub(super) struct Target {
    /// Kind of weight of each input: `class << 4 | nibble`, or of the rotated profile twice the weight in
    /// units of a table's bytes, plus 128.
    pub(super) levels: Vec<u8>,
    /// Side nibble of each block.
    pub(super) sides: Vec<u8>,
}

/// One input's step of the search.
pub(super) struct Step<'a> {
    /// Bits of the next input.
    pub(super) next_bits: u32,
    /// Bits of this one.
    pub(super) bits: u32,
    /// Cheapest way on from each group of the next input, that input's cost not yet counted.
    pub(super) ways: &'a [u8],
    /// Cost of each state of the next input.
    pub(super) costs: &'a [u8],
    /// At most the smallest of the sums; subtracted from the results, so that they stay small.
    pub(super) floor: u8,
    /// Cheapest way on from each group of this input: for group g,
    /// `min over j of min(255, ways[s >> next_bits] + costs[s]) − floor`, `s = g + j · groups`.
    pub(super) out: &'a mut [u8],
    /// The first j that is cheapest: per 64 groups `bits` words, of which word b holds its bit b.
    pub(super) choices: &'a mut [u64],
}

impl Step<'_> {
    /// Asserts that the lengths belong together, and says how many groups there are, a multiple of 64.
    pub(super) fn groups(&self) -> usize {
        let groups = self.out.len();
        assert!(groups.is_multiple_of(64) && groups << self.bits == self.costs.len());
        assert_eq!(self.ways.len(), self.costs.len() >> self.next_bits);
        assert_eq!(self.choices.len(), groups / 64 * self.bits as usize);
        groups
    }
}

/// The specification of a step; returns the smallest of the results.
pub(super) fn step(s: Step<'_>) -> u8 {
    let groups = s.groups();
    let chunks = s.out.chunks_exact_mut(64).zip(s.choices.chunks_exact_mut(s.bits as usize));
    let mut smallest = u8::MAX;
    for (chunk, (out, planes)) in chunks.enumerate() {
        let (mut best, mut choice) = ([u8::MAX; 64], [0u8; 64]);
        for j in 0..1 << s.bits {
            let first = chunk * 64 + j * groups;
            let costs = &s.costs[first..first + 64];
            for i in 0..64 {
                let sum = s.ways[(first + i) >> s.next_bits].saturating_add(costs[i]);
                if sum < best[i] {
                    (best[i], choice[i]) = (sum, j as u8);
                }
            }
        }
        for (out, best) in out.iter_mut().zip(best) {
            *out = best - s.floor;
            smallest = smallest.min(*out);
        }
        for (bit, plane) in planes.iter_mut().enumerate() {
            *plane = (0..64).fold(0, |word, i| word | u64::from(choice[i] >> bit & 1) << i);
        }
    }
    smallest
}

/// Which code runs the steps; all give the same bytes.
#[derive(Clone, Copy)]
pub(super) struct Stepper {
    name: &'static str,
    /// May need CPU features, which [`all`](Self::all) has checked.
    step: unsafe fn(Step<'_>) -> u8,
}

impl Stepper {
    /// Everything this CPU can run, the specification first and the fastest last.
    pub(super) fn all() -> Vec<Self> {
        #[allow(unused_mut, reason = "only some machines have more")]
        let mut all = vec![Self { name: "scalar", step }];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") {
                all.push(Self { name: "avx2", step: super::viterbi_avx2::step });
            }
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
                all.push(Self { name: "avx512", step: super::viterbi_avx512::step });
            }
        }
        all
    }

    pub(super) fn fastest() -> Self {
        Self::all().pop().expect("the specification runs everywhere")
    }

    fn run(&self, s: Step<'_>) -> u8 {
        #[expect(unsafe_code, reason = "steps may need CPU features")]
        // SAFETY: a step is a safe function that needs CPU features at most; `all`, which alone
        // makes steppers, has checked that this CPU has them.
        unsafe {
            (self.step)(s)
        }
    }
}

/// A search with its tables. `found` of [`Scratch`] is what it finds.
pub(super) struct Search {
    trellis: Trellis,
    stepper: Stepper,
    /// Cost of each state, (levels, 2^width).
    costs: Vec<u8>,
}

/// Memory of a search, to be used for many rows.
#[derive(Default)]
pub(super) struct Scratch {
    ways: Vec<u8>,
    out: Vec<u8>,
    choices: Vec<u64>,
    /// State of every input of the row searched last.
    pub(super) found: Vec<u16>,
}

impl Search {
    pub(super) fn new(trellis: Trellis, costs: &[Costs], stepper: Stepper) -> Self {
        let states = 0..1u32 << trellis.width;
        let of_level = |level: &Costs| {
            let level = *level;
            states.clone().map(move |s| level[usize::from(trellis.entry(s as u16))])
        };
        Self { trellis, stepper, costs: costs.iter().flat_map(of_level).collect() }
    }

    pub(super) fn name(&self) -> &'static str {
        self.stepper.name
    }

    /// Finds the cheapest states of a row; of equally cheap ways on, the first.
    pub(super) fn row(&self, target: &Target, scratch: &mut Scratch) {
        let Scratch { ways, out, choices, found } = scratch;
        let cols = target.levels.len();
        found.clear();
        found.resize(cols, 0);
        let Some(last) = cols.checked_sub(1) else { return };
        let width = self.trellis.width;
        let bits: [usize; GROUP] = std::array::from_fn(|i| self.trellis.bits(i));
        let groups = bits.map(|bits| 1 << (width - bits));
        // Words of choices for each input; the most of any, so that places are easy to find.
        let stride = (0..GROUP).map(|i| groups[i] / 64 * bits[i]).max().unwrap_or(0);
        choices.resize(cols * stride, 0);
        let level = |col: usize| {
            let level = usize::from(target.levels[col]);
            &self.costs[level << width..(level + 1) << width]
        };

        // Beyond the last input any bits may follow, for nothing.
        ways.clear();
        ways.resize(groups[last % GROUP], 0);
        let mut floor = 0;
        for col in (0..last).rev() {
            let (this, next) = (col % GROUP, (col + 1) % GROUP);
            out.resize(groups[this], 0);
            floor = self.stepper.run(Step {
                next_bits: bits[next] as u32,
                bits: bits[this] as u32,
                ways,
                costs: level(col + 1),
                floor,
                out,
                choices: &mut choices[col * stride..][..groups[this] / 64 * bits[this]],
            });
            if (col + 1).is_multiple_of(BLOCK) {
                let delta = |block: usize| i32::from(target.sides[block] & super::MAX_DELTA);
                let (here, ahead) = (delta(col / BLOCK), delta(col / BLOCK + 1));
                if here != ahead {
                    change_unit(out, floor, here - ahead);
                    floor = 0;
                }
            }
            std::mem::swap(ways, out);
        }

        let costs = level(0);
        let total = |s: usize| u16::from(ways[s >> bits[0]]) + u16::from(costs[s]);
        let mut state = (0..1usize << width).min_by_key(|&s| total(s)).unwrap_or(0);
        for col in 0..last {
            found[col] = state as u16;
            let (bits, groups) = (bits[col % GROUP], groups[col % GROUP]);
            let group = state >> bits;
            let planes = &choices[col * stride + group / 64 * bits..][..bits];
            let choice = |b: usize| (planes[b] >> (group % 64) & 1) as usize;
            state = group + (0..bits).fold(0, |j, b| j | choice(b) << b) * groups;
        }
        found[last] = state as u16;
    }
}

/// From one block to the one before it: costs are squares in units of a block's power of two, which
/// falls by `by` powers.
fn change_unit(costs: &mut [u8], floor: u8, by: i32) {
    if by < 0 {
        let shift = (-2 * by).min(8) as u32;
        costs.iter_mut().for_each(|c| *c = (u16::from(*c - floor) >> shift) as u8);
    } else {
        let shift = (2 * by).min(8) as u32;
        costs.iter_mut().for_each(|c| *c = (u16::from(*c - floor) << shift).min(255) as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A few bytes of every kind: xorshift.
    fn bytes(seed: &mut u64, n: usize, most: u8) -> Vec<u8> {
        let mut next = || {
            *seed ^= *seed << 13;
            *seed ^= *seed >> 7;
            *seed ^= *seed << 17;
            (*seed >> 32) as u8 % (most + 1)
        };
        (0..n).map(|_| next()).collect()
    }

    #[test]
    fn every_stepper_gives_the_specifications_bytes() {
        let mut seed = 0x1234_5678_9abc_def0;
        for (next_bits, bits) in [(2, 2), (2, 3), (3, 2), (3, 3), (3, 4), (4, 3), (4, 4)] {
            for width in 10..=14 {
                // Small numbers for many ties, large ones for sums beyond 255.
                for most in [3, 40, 254] {
                    let floor = most / 3;
                    let mut ways = bytes(&mut seed, 1 << (width - next_bits), most);
                    ways.iter_mut().for_each(|w| *w = (*w).max(floor));
                    let costs = bytes(&mut seed, 1 << width, most);
                    let groups = 1usize << (width - bits);
                    let run = |stepper: &Stepper| {
                        let mut out = vec![0; groups];
                        let mut choices = vec![0; groups / 64 * bits];
                        let smallest = stepper.run(Step {
                            next_bits: next_bits as u32,
                            bits: bits as u32,
                            ways: &ways,
                            costs: &costs,
                            floor,
                            out: &mut out,
                            choices: &mut choices,
                        });
                        (smallest, out, choices)
                    };
                    let all = Stepper::all();
                    let expected = run(&all[0]);
                    assert_eq!(expected.0, *expected.1.iter().min().unwrap());
                    for stepper in &all[1..] {
                        let name = stepper.name;
                        assert!(run(stepper) == expected, "{name} {next_bits} {bits} {width}");
                    }
                }
            }
        }
    }

    #[test]
    fn of_equal_sums_the_first_is_chosen_and_large_ones_saturate() {
        let mut costs = vec![200u8; 1 << 10];
        costs[5 + 2 * 256] = 100;
        costs[5 + 3 * 256] = 100;
        for stepper in Stepper::all() {
            let (mut out, mut choices) = (vec![0; 256], vec![0; 8]);
            let (ways, costs) = (vec![90; 256], &costs);
            let (out_ref, choices_ref) = (&mut out, &mut choices);
            let smallest = stepper.run(Step {
                next_bits: 2,
                bits: 2,
                ways: &ways,
                costs,
                floor: 0,
                out: out_ref,
                choices: choices_ref,
            });
            assert_eq!((smallest, out[5], out[4]), (190, 190, 255), "{}", stepper.name);
            assert_eq!(choices[..2], [0, 1 << 5], "{}", stepper.name);
        }
    }

    #[test]
    fn units_change_by_powers_of_four_and_saturate() {
        let changed = |by| {
            let mut costs = [7, 8, 23, 80];
            change_unit(&mut costs, 7, by);
            costs
        };
        assert_eq!(changed(-1), [0, 0, 4, 18]);
        assert_eq!(changed(1), [0, 4, 64, 255]);
        assert_eq!(changed(-7), [0, 0, 0, 0]);
        assert_eq!(changed(7), [0, 255, 255, 255]);
    }

    #[test]
    fn what_is_found_is_a_stream_and_the_cheapest_one() {
        let mut seed = 99;
        for (rate, width) in [(16, 10), (19, 10), (23, 11), (24, 10), (26, 11), (28, 10), (32, 11)]
        {
            let trellis = Trellis::rotated(rate, width).unwrap();
            // Cheap enough that no sum reaches 255, where it would stop growing.
            let mut level_costs = || -> Costs { bytes(&mut seed, 64, 3).try_into().unwrap() };
            let costs: Vec<Costs> = (0..32).map(|_| level_costs()).collect();
            let levels = bytes(&mut seed, 64, 31);
            let cost = |col: usize, s: usize| {
                let entry = trellis.entry(s as u16);
                u32::from(costs[usize::from(levels[col])][usize::from(entry)])
            };
            // From the first input to the last, all states kept apart: the search the other way round.
            let mut least: Vec<u32> = (0..1 << width).map(|s| cost(0, s)).collect();
            for col in 1..64 {
                let bits = trellis.bits((col - 1) % GROUP);
                let from = |s: usize| {
                    let low = (s << bits) & ((1 << width) - 1);
                    least[low..low + (1 << bits)].iter().min().unwrap() + cost(col, s)
                };
                least = (0..1 << width).map(from).collect();
            }
            let target = Target { levels: levels.clone(), sides: vec![0; 2] };
            for stepper in Stepper::all() {
                let mut scratch = Scratch::default();
                Search::new(trellis, &costs, stepper).row(&target, &mut scratch);
                let found: Vec<usize> = scratch.found.iter().map(|&s| usize::from(s)).collect();
                for col in 1..64 {
                    let bits = trellis.bits((col - 1) % GROUP);
                    let kept = (1 << (width - bits)) - 1;
                    assert_eq!(found[col] & kept, found[col - 1] >> bits, "{rate} {col}");
                }
                let total: u32 = found.iter().enumerate().map(|(col, &s)| cost(col, s)).sum();
                assert_eq!(Some(&total), least.iter().min(), "{rate} {width}");
            }
        }
    }
}
