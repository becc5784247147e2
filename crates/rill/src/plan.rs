//! The memory plan: what a budget is spent on, decided before anything is loaded.
//!
//! [`Sizes`] says what a model takes, [`Plan::new`] divides a budget. `docs/memory.md` explains
//! every line.

mod sizes;

use std::fmt;

use rill_kernels::LatentFormat;
use rill_stream::machine::{self, MemoryLimit};

use crate::error::Error;

pub(crate) use sizes::{Footprint, checkpoint_record_bytes, widened};
pub use sizes::{Recode, Sizes, TokenWeights};

/// What the program holds before a model is open. 30.1 MB were measured with the tokenizer of a
/// vocabulary as large as K3's (`docs/memory.md` has the command); the rest is for what the
/// allocator keeps for itself.
pub const PROCESS_BYTES: u64 = 48 << 20;
/// What a thread that computes or reads touches of its stack and its part of the heap: 27 kB were
/// measured with the demo model, a block of K3's latents that are kept as halves takes 144 KiB more
/// while it is read, and allocators keep a part of the heap for each.
pub const THREAD_BYTES: u64 = 256 << 10;
/// What a published checkpoint's index takes for each tensor: 159 bytes were measured with K3's
/// 497,220, to which the engine adds up to 12 to find the tensors of an expert.
pub(crate) const INDEX_BYTES_PER_TENSOR: u64 = 176;

/// Most bytes of a streamed head that are read at once.
const HEAD_PIECE_BYTES: u64 = 64 << 20;
/// Part of what lies between floor and budget that goes to longer pieces of a prompt, at most.
const SCRATCH_SHARE: u64 = 16;

/// Share of all experts that are in slots, and share of a token's experts found there, in percent:
/// Rill's own policy over 300 tokens of Kimi-Linear's routing, from cold (`docs/memory.md`).
const HIT_CURVE: [(f64, f64); 10] = [
    (0.0, 0.0),
    (0.3, 7.6),
    (0.7, 15.8),
    (1.5, 27.0),
    (3.0, 38.4),
    (6.0, 49.9),
    (12.0, 61.8),
    (24.0, 74.4),
    (48.0, 86.9),
    (100.0, 100.0),
];

/// The budget where neither the user nor the system says anything.
const ASSUMED_BYTES: u64 = 4_000_000_000;

/// A budget and where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Budget {
    /// As asked for.
    Asked(u64),
    /// What this machine can spare now.
    Chosen(MemoryLimit),
    /// A guess: the system does not tell.
    Assumed,
}

impl Budget {
    /// A budget of this many bytes; 0 lets the machine choose: three quarters of what it, or a
    /// control group, allows, less what others hold.
    pub fn new(asked_bytes: u64) -> Self {
        match asked_bytes {
            0 => match machine::tightest(&machine::memory_limits()) {
                Some(limit) => Budget::Chosen(limit.clone()),
                None => Budget::Assumed,
            },
            bytes => Budget::Asked(bytes),
        }
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Budget::Asked(bytes) => *bytes,
            Budget::Chosen(limit) => limit.usable_bytes(),
            Budget::Assumed => ASSUMED_BYTES,
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Budget::Asked(bytes) => write!(f, "{}, as asked", size(*bytes)),
            Budget::Chosen(limit) => write!(
                f,
                "{}, chosen: three quarters of what there is, less what others hold ({limit})",
                size(limit.usable_bytes())
            ),
            Budget::Assumed => write!(
                f,
                "{}, assumed: this system does not tell how much memory there is; name a budget",
                size(ASSUMED_BYTES)
            ),
        }
    }
}

/// The lines of a plan that are counted for each session.
const SESSION_PURPOSES: [&str; 2] = ["KDA state", "latent cache"];

/// What choosing a token makes of its logits: a copy for a filter, one with penalties, the order of
/// those that may come, and their probabilities.
const DRAW_COPIES: usize = 4;

/// The line of snapshots, which come and go.
pub(crate) const SNAPSHOTS: &str = "snapshots";

/// What a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanOptions {
    /// Bytes that the whole process may take.
    pub budget_bytes: u64,
    /// Longest context, in tokens. The cache for all of it is counted from the start.
    pub context: usize,
    /// How what attention remembers is kept.
    pub latents: LatentFormat,
    /// Longest piece of a prompt that passes through a layer together, in tokens.
    pub prefill_chunk: usize,
    /// Experts of the next layer that may be read ahead, each into a slot of its own.
    pub lookahead: usize,
    /// Threads that compute or read.
    pub threads: usize,
    /// Sessions that are open at once.
    pub sessions: usize,
    /// Positions whose logits are asked for at once.
    pub logits: usize,
    /// Bytes set aside for snapshots of sessions.
    pub snapshot_bytes: u64,
}

impl Default for PlanOptions {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            budget_bytes: 0,
            context: 4096,
            latents: LatentFormat::F32,
            prefill_chunk: 64,
            lookahead: 0,
            threads,
            sessions: 1,
            logits: 1,
            snapshot_bytes: 0,
        }
    }
}

/// How a budget is divided, and what that costs in reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What it was made for.
    pub options: PlanOptions,
    /// What each part may take. Their sum is within the budget.
    pub shares: Shares,
    /// Whether each layer's matrices are held; those of the others are read for every token:
    /// (layers).
    pub pinned: Vec<bool>,
    /// Whether the head is held; otherwise it is read in pieces, which fit a ring slot.
    pub head_resident: bool,
    /// Bytes of each of the ring's two slots; 0 when nothing is streamed.
    pub ring_slot_bytes: u64,
    /// Slots for routed experts.
    pub expert_slots: u64,
    /// Bytes of one of them: of the largest expert.
    pub record_bytes: u64,
    /// Bytes of an expert on average, which is what reads are counted with.
    pub mean_record_bytes: u64,
    /// Whether sizes of experts are estimated.
    pub estimated: bool,
    /// Routed experts in all.
    pub n_records: u64,
    /// Tokens of a prompt that pass through a layer together.
    pub prefill_chunk: usize,
    /// Least budget that a plan can be made for.
    pub floor_bytes: u64,
    /// Routed experts of one token.
    pub working_set_bytes: u64,
    /// The budget that holds the trunk and one token's experts: below it a cache has little to
    /// give, above it only expert reads get fewer.
    pub recommended_bytes: u64,
    /// Trunk that is read for every token.
    pub trunk_read_bytes: u64,
    /// Routed experts that are read for a token, as far as measured routing tells.
    pub expert_read_bytes: u64,
    /// All of the model's files.
    pub disk_bytes: u64,
}

/// What each part of the process may take, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// Program, threads, and the index of names.
    pub baseline: u64,
    /// Small tensors of the trunk, as f32.
    pub vectors: u64,
    /// Matrices of pinned layers.
    pub pinned: u64,
    /// The two slots through which other layers pass.
    pub ring: u64,
    /// The head, if it is held.
    pub head: u64,
    /// Recurrent state of the sessions.
    pub state: u64,
    /// Latent cache for the whole context.
    pub cache: u64,
    /// Snapshots of sessions.
    pub snapshots: u64,
    /// Activations and logits.
    pub scratch: u64,
    /// Images are not read yet.
    pub vision: u64,
    /// Slots of routed experts.
    pub slots: u64,
}

impl Shares {
    /// Name and bytes of each part. The names are the purposes of leases.
    pub fn lines(&self) -> [(&'static str, u64); 11] {
        [
            ("process baseline", self.baseline),
            ("trunk vectors", self.vectors),
            ("trunk pinned", self.pinned),
            ("trunk ring", self.ring),
            ("head", self.head),
            ("KDA state", self.state),
            ("latent cache", self.cache),
            (SNAPSHOTS, self.snapshots),
            ("scratch", self.scratch),
            ("vision", self.vision),
            ("expert slots", self.slots),
        ]
    }

    /// Their sum.
    pub fn total(&self) -> u64 {
        self.lines().iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

impl Plan {
    /// Divides a budget: the trunk first, then slots for experts, a small part for longer pieces
    /// of prompts. Of all placements that fit, that with the fewest bytes read per token.
    ///
    /// # Errors
    /// [`Error::BelowFloor`], with the smallest plan there is, when the budget is below it;
    /// [`Error::ContextFull`] when the model was not made for so long a context.
    pub fn new(sizes: &Sizes, options: PlanOptions) -> Result<Self, Error> {
        if options.context > sizes.max_context {
            return Err(Error::ContextFull {
                positions: options.context,
                max_positions: sizes.max_context,
            });
        }
        let planner = Planner::new(sizes, options);
        match planner.best() {
            Some(plan) => Ok(plan),
            None => {
                let (scratch, slots) = (planner.fixed.scratch, planner.min_slots);
                let smallest = planner.assemble(&planner.floor, scratch, slots);
                Err(Error::BelowFloor { plan: Box::new(smallest) })
            }
        }
    }

    /// What the engine itself holds from opening on: all but the parts of sessions and snapshots.
    pub(crate) fn engine_lines(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let lines = self.shares.lines().into_iter();
        lines.filter(|(purpose, _)| !SESSION_PURPOSES.contains(purpose) && *purpose != SNAPSHOTS)
    }

    /// What one session holds.
    pub(crate) fn session_lines(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let sessions = self.options.sessions.max(1) as u64;
        let lines = self.shares.lines().into_iter();
        lines
            .filter(|(purpose, _)| SESSION_PURPOSES.contains(purpose))
            .map(move |(purpose, bytes)| (purpose, bytes / sessions))
    }

    /// Bytes that one session takes, with the cache for its whole context.
    pub fn session_bytes(&self) -> u64 {
        self.session_lines().fold(0, |sum, (_, bytes)| sum.saturating_add(bytes))
    }

    /// Bytes read for one token: trunk that is streamed, and expected experts.
    pub fn bytes_per_token(&self) -> u64 {
        self.trunk_read_bytes.saturating_add(self.expert_read_bytes)
    }

    /// Share of a token's experts that are expected to be in a slot, from 0 to 1.
    pub fn hit_share(&self) -> f64 {
        1.0 - self.expert_read_bytes as f64 / self.working_set_bytes.max(1) as f64
    }

    /// What each line stands for in this plan.
    fn explanations(&self) -> [String; 11] {
        let n_pinned = self.pinned.iter().filter(|pinned| **pinned).count();
        let n_layers = self.pinned.len();
        let sessions = self.options.sessions;
        let share = 100.0 * self.expert_slots as f64 / self.n_records.max(1) as f64;
        [
            format!("the program, {} threads, the index of names", self.options.threads),
            "norms, convolutions and biases of all layers".to_owned(),
            format!("matrices of {n_pinned} of {n_layers} layers"),
            match self.ring_slot_bytes {
                0 => "nothing is streamed".to_owned(),
                slot => format!("two slots of {} for what is read anew", size(slot)),
            },
            match self.head_resident {
                true => "held".to_owned(),
                false => "read in pieces for every token".to_owned(),
            },
            match sessions {
                1 => "of one session, before and after a step".to_owned(),
                n => format!("of {n} sessions, before and after a step"),
            },
            match self.options.latents {
                LatentFormat::F32 => format!("{} tokens of context", self.options.context),
                format => format!("{} tokens of context, {format}", self.options.context),
            },
            match self.options.snapshot_bytes {
                0 => "none are kept".to_owned(),
                _ => "beginnings of conversations".to_owned(),
            },
            format!("prompts in pieces of {} tokens", self.prefill_chunk),
            "images are not read yet".to_owned(),
            format!(
                "{} of {}{}, {share:.1} % of all",
                self.expert_slots,
                size(self.record_bytes),
                match () {
                    () if self.estimated => ", estimated",
                    () if self.mean_record_bytes < self.record_bytes => ", the largest expert",
                    () => "",
                }
            ),
        ]
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line =
            |name: &str, bytes: u64, why: &str| writeln!(f, "{name:<18}{:>10}  {why}", size(bytes));
        for ((name, bytes), why) in self.shares.lines().into_iter().zip(self.explanations()) {
            line(name, bytes, &why)?;
        }
        line(
            "in all",
            self.shares.total(),
            &format!("of a budget of {}", size(self.options.budget_bytes)),
        )?;
        line("floor", self.floor_bytes, "the least budget that works")?;
        line("recommended", self.recommended_bytes, "holds the trunk and one token's experts")?;
        line("working set", self.working_set_bytes, "routed experts of one token")?;
        line("trunk read", self.trunk_read_bytes, "for every token")?;
        let hits = format!("for every token, expecting {:.0} % in slots", 100.0 * self.hit_share());
        line("experts read", self.expert_read_bytes, &hits)?;
        let files =
            if self.estimated { "the model's files, estimated" } else { "the model's files" };
        line("disk", self.disk_bytes, files)
    }
}

/// A budget's division as far as it does not depend on the budget.
struct Planner<'a> {
    sizes: &'a Sizes,
    options: PlanOptions,
    /// What is the same in every plan; scratch is that of one token.
    fixed: Shares,
    /// Layers by falling size, ties by index. Pinning the largest first shrinks the ring most.
    order: Vec<usize>,
    min_slots: u64,
    logits_bytes: u64,
    max_scratch_bytes: u64,
    /// The placement that takes least, and what that takes.
    floor: Placement,
    floor_bytes: u64,
}

/// Which part of the trunk is held.
#[derive(Clone, Copy, Debug, Default)]
struct Placement {
    /// The first of the planner's order.
    n_pinned: usize,
    head_resident: bool,
    pinned_bytes: u64,
    ring_slot_bytes: u64,
    /// Trunk and head that are read for every token.
    read_bytes: u64,
}

impl<'a> Planner<'a> {
    fn new(sizes: &'a Sizes, options: PlanOptions) -> Self {
        let sessions = options.sessions as u64;
        let threads = options.threads as u64;
        let logits = options.logits.max(1).saturating_add(DRAW_COPIES) as u64;
        let logits_bytes = sizes.logits_bytes.saturating_mul(logits);
        let fixed = Shares {
            baseline: PROCESS_BYTES
                .saturating_add(sizes.index_bytes)
                .saturating_add(threads.saturating_mul(THREAD_BYTES)),
            vectors: sizes.vector_bytes,
            state: sizes.session_bytes.saturating_mul(sessions),
            cache: sizes
                .cache_values_per_token
                .saturating_mul(options.latents.bytes() as u64)
                .saturating_mul(options.context as u64)
                .saturating_mul(sessions),
            snapshots: options.snapshot_bytes,
            scratch: logits_bytes.saturating_add(sizes.scratch_bytes_per_token),
            ..Shares::default()
        };
        let mut order: Vec<usize> = (0..sizes.layer_bytes.len()).collect();
        order.sort_by_key(|&layer| std::cmp::Reverse(sizes.layer_bytes[layer]));
        // All experts that one token needs of a layer: with fewer, the layer would wait for a
        // read in the middle of every token, and there would be no choice of what to keep.
        let min_slots = sizes.top_k.saturating_add(options.lookahead) as u64;
        // Sessions can share a step, so it may have tokens of all of them.
        let most = options.context.saturating_mul(options.sessions).max(1);
        let chunk = options.prefill_chunk.clamp(1, most) as u64;
        let max_scratch_bytes =
            sizes.scratch_bytes_per_token.saturating_mul(chunk).saturating_add(logits_bytes);
        let mut planner = Self {
            sizes,
            options,
            fixed,
            order,
            min_slots,
            logits_bytes,
            max_scratch_bytes,
            floor: Placement::default(),
            floor_bytes: 0,
        };
        let least = |placement: &Placement| {
            planner.shares(placement, planner.fixed.scratch, planner.min_slots).total()
        };
        let floor = planner.placements().into_iter().min_by_key(least);
        planner.floor = floor.expect("nothing pinned is a placement");
        planner.floor_bytes =
            planner.shares(&planner.floor, planner.fixed.scratch, planner.min_slots).total();
        planner
    }

    /// Every placement: the largest layers pinned, from none to all, with and without the head.
    fn placements(&self) -> Vec<Placement> {
        let sizes = self.sizes;
        let layers = || self.order.iter().map(|&layer| sizes.layer_bytes[layer]);
        let all = layers().fold(0, u64::saturating_add);
        let mut placements = Vec::with_capacity(2 * (self.order.len() + 1));
        for head_resident in [false, true] {
            let mut pinned_bytes = 0u64;
            for n_pinned in 0..=self.order.len() {
                let largest = layers().nth(n_pinned).unwrap_or(0);
                let (piece, head) = match head_resident {
                    true => (0, 0),
                    // A whole row at least, codes and scales in two reads.
                    false => {
                        let row = 2 * sizes::widened(sizes.head_row_bytes);
                        (HEAD_PIECE_BYTES.max(row).min(sizes.head_bytes), sizes.head_bytes)
                    }
                };
                placements.push(Placement {
                    n_pinned,
                    head_resident,
                    pinned_bytes,
                    ring_slot_bytes: largest.max(piece),
                    read_bytes: all.saturating_sub(pinned_bytes).saturating_add(head),
                });
                pinned_bytes = pinned_bytes.saturating_add(largest);
            }
        }
        placements
    }

    fn shares(&self, placement: &Placement, scratch: u64, slots: u64) -> Shares {
        Shares {
            pinned: placement.pinned_bytes,
            ring: placement.ring_slot_bytes.saturating_mul(2),
            head: if placement.head_resident { self.sizes.head_bytes } else { 0 },
            scratch,
            slots: slots.saturating_mul(self.sizes.record_bytes),
            ..self.fixed
        }
    }

    /// Expected bytes of experts that a token reads with this many slots. Never more with more.
    fn expert_read_bytes(&self, slots: u64) -> u64 {
        let share = 100.0 * slots as f64 / self.sizes.n_records().max(1) as f64;
        let missed = 1.0 - hit_percent(share) / 100.0;
        (self.sizes.working_set_bytes() as f64 * missed) as u64
    }

    /// The best plan for the budget; `None` below the floor.
    fn best(&self) -> Option<Plan> {
        let (sizes, budget_bytes) = (self.sizes, self.options.budget_bytes);
        // What is left after scratch grows with the budget too, so that a larger one never reads
        // more.
        let extra = budget_bytes.checked_sub(self.floor_bytes)? / SCRATCH_SHARE;
        let scratch = self.fixed.scratch.saturating_add(extra).min(self.max_scratch_bytes);
        let max_slots = sizes.n_records().max(self.min_slots);
        let fitting = self.placements().into_iter().filter_map(|placement| {
            let taken = self.shares(&placement, scratch, 0).total();
            let room = budget_bytes.checked_sub(taken)?;
            let slots = room.checked_div(sizes.record_bytes).unwrap_or(max_slots).min(max_slots);
            (slots >= self.min_slots).then_some((placement, slots))
        });
        let reads = |(placement, slots): &(Placement, u64)| {
            let bytes = placement.read_bytes.saturating_add(self.expert_read_bytes(*slots));
            (bytes, std::cmp::Reverse(*slots))
        };
        let (placement, slots) = fitting.min_by_key(reads)?;
        Some(self.assemble(&placement, scratch, slots))
    }

    fn assemble(&self, placement: &Placement, scratch: u64, slots: u64) -> Plan {
        let sizes = self.sizes;
        let mut pinned = vec![false; self.order.len()];
        for &layer in &self.order[..placement.n_pinned] {
            pinned[layer] = true;
        }
        let piece =
            scratch.saturating_sub(self.logits_bytes) / sizes.scratch_bytes_per_token.max(1);
        Plan {
            options: self.options,
            shares: self.shares(placement, scratch, slots),
            pinned,
            head_resident: placement.head_resident,
            ring_slot_bytes: placement.ring_slot_bytes,
            expert_slots: slots,
            record_bytes: sizes.record_bytes,
            mean_record_bytes: sizes.mean_record_bytes,
            estimated: sizes.estimated,
            n_records: sizes.n_records(),
            prefill_chunk: piece.max(1) as usize,
            floor_bytes: self.floor_bytes,
            working_set_bytes: sizes.working_set_bytes(),
            recommended_bytes: self.recommended_bytes(),
            trunk_read_bytes: placement.read_bytes,
            expert_read_bytes: self.expert_read_bytes(slots),
            disk_bytes: sizes.disk_bytes,
        }
    }

    fn recommended_bytes(&self) -> u64 {
        let placements = self.placements();
        let all = placements.last().expect("the last holds everything");
        let per_token = (self.sizes.moe_layers * self.sizes.top_k) as u64;
        let slots = per_token.max(self.min_slots);
        let least = self.shares(all, self.fixed.scratch, slots).total();
        // Longer pieces of prompts get their share of any budget, until they are as long as may be.
        let shared = least.saturating_mul(SCRATCH_SHARE).saturating_sub(self.floor_bytes);
        let longest = least.saturating_add(self.max_scratch_bytes - self.fixed.scratch);
        shared.div_ceil(SCRATCH_SHARE - 1).min(longest).max(self.floor_bytes)
    }
}

/// The curve between its points, in percent.
fn hit_percent(share: f64) -> f64 {
    let end = HIT_CURVE.iter().position(|(x, _)| share <= *x);
    match end {
        None => 100.0,
        Some(0) => 0.0,
        Some(end) => {
            let ((x0, y0), (x1, y1)) = (HIT_CURVE[end - 1], HIT_CURVE[end]);
            (y0 + (y1 - y0) * ((share - x0) / (x1 - x0))).min(y1)
        }
    }
}

/// Bytes for people, in powers of 1,000.
fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ if value < 9.995 => format!("{value:.2} {}", units[unit]),
        _ if value < 99.95 => format!("{value:.1} {}", units[unit]),
        _ => format!("{value:.0} {}", units[unit]),
    }
}
