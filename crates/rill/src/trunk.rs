//! The matrices that every token needs: those of pinned layers are held, the others pass through a
//! ring of two slots, read one unit ahead of their use.
//!
//! A unit is what is read at a time: a layer's matrices, or a piece of the head.

use std::ops::{Deref, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rill_format::DataExtent;
use rill_format::container::checksum;
use rill_kernels::{Codec, Matrix};
use rill_stream::{AlignedBuf, Extent, Placement, Priority, ReadError, Readers, Record};

use crate::error::Error;
use crate::experts::Values;
use crate::plan::Plan;
use crate::source::WeightSource;
use crate::streamed::extent;

/// A matrix's number within its layer's unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear(pub(crate) usize);

/// A matrix of the trunk, as stored.
#[derive(Clone, Debug)]
pub(crate) struct StoredMatrix {
    pub(crate) name: String,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) codec: Codec,
}

/// One unit: where its bytes come from and which matrices they are.
#[derive(Debug)]
struct Unit {
    /// For messages.
    what: String,
    /// Of the layer whose run is checked as a whole, where the folder has such.
    run: Option<usize>,
    /// Of each of the placement's parts, what it was when the model was opened, where that is known.
    sums: Vec<Option<u64>>,
    placement: Placement,
    matrices: Vec<(StoredMatrix, Place)>,
}

/// Where a matrix's bytes are.
#[derive(Clone, Debug)]
enum Place {
    /// In the unit's buffer: codes, scales.
    Buffer(Range<usize>, Range<usize>),
    /// Stored in another way than kernels read it, and converted when the unit is read.
    Converted(usize),
}

/// Why a unit could not be had, and the buffer that was meant for it.
type Unread = Box<(AlignedBuf, Error)>;

/// A unit in memory.
#[derive(Debug)]
pub(crate) struct UnitBytes {
    unit: Arc<Unit>,
    buffer: AlignedBuf,
    converted: Vec<(Vec<u8>, Vec<u8>)>,
}

impl UnitBytes {
    pub(crate) fn view(&self, linear: Linear) -> Matrix<'_> {
        self.matrix(linear.0, Values::Accepted).expect("checked when it was read")
    }

    fn matrix(&self, index: usize, values: Values) -> Result<Matrix<'_>, Error> {
        let (stored, place) = &self.unit.matrices[index];
        let (codes, scales) = match place {
            Place::Buffer(codes, scales) => {
                let bytes = self.buffer.as_slice();
                (&bytes[codes.clone()], &bytes[scales.clone()])
            }
            Place::Converted(i) => (&self.converted[*i].0[..], &self.converted[*i].1[..]),
        };
        values
            .open(stored.codec, stored.rows, stored.cols, codes, scales, &[])
            .map_err(|source| Error::Layout { tensor: stored.name.clone(), source })
    }

    /// What has been read, checked and with everything converted that needs it.
    fn new(
        unit: Arc<Unit>,
        buffer: AlignedBuf,
        source: &dyn WeightSource,
        verify: bool,
    ) -> Result<Self, Unread> {
        let mut bytes = Self { unit, buffer, converted: Vec::new() };
        // A panic here would lose the buffer and leave somebody waiting for ever.
        let finished = catch_unwind(AssertUnwindSafe(|| bytes.finish(source, verify)));
        let finished = finished.unwrap_or_else(|_| {
            let reason = "its check broke down; please report this as a bug";
            Err(bytes.unit.failed(ReadError::Refused(reason.into())))
        });
        match finished {
            Ok(()) => Ok(bytes),
            Err(error) => Err(Box::new((bytes.buffer, error))),
        }
    }

    fn finish(&mut self, source: &dyn WeightSource, verify: bool) -> Result<(), Error> {
        if let (Some(layer), true) = (self.unit.run, verify) {
            let run = Record::new(self.buffer.as_slice(), &self.unit.placement);
            source.check_run(layer, run.joined())?;
        }
        for (part, sum) in self.unit.placement.parts.iter().zip(&self.unit.sums) {
            // Where nothing is known, summing up hundreds of megabytes a token would be for nothing.
            let Some(sum) = *sum else { continue };
            if checksum(&self.buffer.as_slice()[part.clone()]) != sum {
                return Err(self.unit.failed(ReadError::Refused(CHANGED.into())));
            }
        }
        for (stored, place) in &self.unit.matrices {
            if let Place::Converted(_) = place {
                self.converted.push(source.read(&stored.name)?);
            }
        }
        (0..self.unit.matrices.len())
            .try_for_each(|index| self.matrix(index, Values::Unseen).map(|_| ()))
    }
}

/// The trunk of an open model.
pub(crate) struct Trunk {
    /// Layers, then pieces of the head.
    units: Vec<Arc<Unit>>,
    n_layers: usize,
    /// Units that are held.
    pinned: Vec<Option<Arc<UnitBytes>>>,
    /// Rows of the head, (first, number), by piece.
    head_rows: Vec<(usize, usize)>,
    ring: Arc<Ring>,
    readers: Arc<Readers>,
    source: Arc<dyn WeightSource>,
    verify: bool,
    /// Read the next unit while one is in use.
    overlap: bool,
}

/// What the trunk has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrunkCounters {
    /// Bytes read anew for tokens; what was read once at open is not counted.
    pub streamed_bytes: u64,
    /// Time spent waiting for them.
    pub stall: Duration,
}

impl Trunk {
    /// Reads what the plan pins.
    pub(crate) fn open(
        source: Arc<dyn WeightSource>,
        layers: Vec<Vec<StoredMatrix>>,
        head: &StoredMatrix,
        plan: &Plan,
        readers: Arc<Readers>,
        verify: bool,
        overlap: bool,
    ) -> Result<Self, Error> {
        let n_layers = layers.len();
        let mut units: Vec<Arc<Unit>> = Vec::new();
        for (index, matrices) in layers.into_iter().enumerate() {
            units.push(Arc::new(Unit::layer(&*source, index, matrices)));
        }
        let slot_bytes = plan.ring_slot_bytes as usize;
        let head_place = source.extents(&head.name);
        // What cannot be read in pieces is held; the plan made the ring as large as that takes.
        let head_held = plan.head_resident || head_place.is_none();
        let head_rows = match head_place {
            Some(extents) if !head_held => head_pieces(extents, head, slot_bytes),
            _ => vec![(0, head.rows)],
        };
        let mut pieces: Vec<(Unit, Vec<DataExtent>)> =
            head_rows.iter().map(|&rows| Unit::head(&*source, head, rows)).collect();
        if verify {
            let parts: Vec<DataExtent> =
                pieces.iter().flat_map(|(_, parts)| parts.clone()).collect();
            let mut sums = source.verify_globals(&parts)?.into_iter();
            for (unit, parts) in &mut pieces {
                unit.sums = sums.by_ref().take(parts.len()).collect();
            }
        }
        units.extend(pieces.into_iter().map(|(unit, _)| Arc::new(unit)));
        let held = |unit: usize| plan.pinned.get(unit).copied().unwrap_or(head_held);
        let streamed: Vec<usize> = (0..units.len()).filter(|&unit| !held(unit)).collect();
        let most = streamed.iter().map(|&unit| units[unit].placement.bytes).max().unwrap_or(0);
        let n_slots = streamed.len().min(2);
        let spare = (0..n_slots).map(|_| buffer(most)).collect::<Result<_, _>>()?;
        let state = RingState {
            spare,
            slots: Vec::new(),
            waiting: vec![0; units.len()],
            starved: 0,
            counters: TrunkCounters::default(),
        };
        let ring = Ring { state: Mutex::new(state), arrived: Condvar::new() };
        let pinned: Vec<usize> = (0..units.len()).filter(|&unit| held(unit)).collect();
        let mut trunk = Self {
            pinned: vec![None; units.len()],
            units,
            n_layers,
            head_rows,
            ring: Arc::new(ring),
            readers,
            source,
            verify,
            overlap,
        };
        trunk.pin(&pinned)?;
        Ok(trunk)
    }

    /// Reads units to keep, all at once.
    fn pin(&mut self, units: &[usize]) -> Result<(), Error> {
        let (send, receive) = mpsc::channel();
        for &index in units {
            let unit = self.units[index].clone();
            let (source, verify, send) = (self.source.clone(), self.verify, send.clone());
            let buffer = buffer(unit.placement.bytes)?;
            let placement = unit.placement.clone();
            let done = Box::new(move |buffer, result: Result<(), ReadError>| {
                let bytes = match result {
                    Ok(()) => {
                        UnitBytes::new(unit, buffer, &*source, verify).map_err(|e| Box::new(e.1))
                    }
                    Err(error) => Err(Box::new(unit.failed(error))),
                };
                // Nobody listens any more after the first failure.
                let _ = send.send((index, bytes));
            });
            let _ticket = self.readers.submit(Priority::Now, buffer, &placement, done);
        }
        drop(send);
        for (index, bytes) in receive {
            self.pinned[index] = Some(Arc::new(bytes.map_err(|error| *error)?));
        }
        match units.iter().find(|&&index| self.pinned[index].is_none()) {
            Some(&index) => Err(Error::Trunk {
                what: self.units[index].what.clone(),
                source: Arc::new(ReadError::Refused("its reader broke down".into())),
            }),
            None => Ok(()),
        }
    }

    /// A layer's matrices, read unless they are in memory. The next unit is put on its way.
    pub(crate) fn layer(&self, layer: usize) -> Result<Held, Error> {
        self.unit(layer)
    }

    /// A layer's matrices if they are in memory.
    pub(crate) fn layer_if_present(&self, layer: usize) -> Option<Held> {
        if layer >= self.n_layers {
            return None;
        }
        if let Some(bytes) = &self.pinned[layer] {
            return Some(Held { bytes: Some(bytes.clone()), ring: None });
        }
        let state = self.ring.lock();
        match state.slots.iter().find(|slot| slot.unit == layer).map(|slot| &slot.stage) {
            Some(Stage::Ready(bytes)) => Some(self.held(bytes)),
            _ => None,
        }
    }

    /// Pieces of the head: the first row of each and its number of rows.
    pub(crate) fn head_rows(&self) -> &[(usize, usize)] {
        &self.head_rows
    }

    /// A piece of the head, its only matrix.
    pub(crate) fn head(&self, piece: usize) -> Result<Held, Error> {
        self.unit(self.n_layers + piece)
    }

    /// What it has done.
    pub(crate) fn counters(&self) -> TrunkCounters {
        self.ring.lock().counters
    }

    fn held(&self, bytes: &Arc<UnitBytes>) -> Held {
        Held { bytes: Some(bytes.clone()), ring: Some(self.ring.clone()) }
    }

    fn unit(&self, index: usize) -> Result<Held, Error> {
        if let Some(bytes) = &self.pinned[index] {
            self.read_next(&mut self.ring.lock(), index);
            return Ok(Held { bytes: Some(bytes.clone()), ring: None });
        }
        let mut state = self.ring.lock();
        let since = Instant::now();
        let mut own = false;
        let held = loop {
            let Some(at) = state.slots.iter().position(|slot| slot.unit == index) else {
                if self.start(&mut state, index, Priority::Now, index) {
                    own = true;
                } else {
                    state.starved += 1;
                    state = self.ring.wait(state);
                    state.starved -= 1;
                }
                continue;
            };
            match &state.slots[at].stage {
                Stage::Ready(bytes) => break self.held(bytes),
                Stage::Reading => {
                    state.waiting[index] += 1;
                    // Whoever waits uses no other unit, so that the drive can go on while this one is
                    // being checked.
                    self.read_next(&mut state, index);
                    state = self.ring.wait(state);
                    state.waiting[index] -= 1;
                }
                Stage::Failed(_) => {
                    let Stage::Failed(error) = state.slots.swap_remove(at).stage else {
                        unreachable!("it was a moment ago")
                    };
                    self.ring.arrived.notify_all();
                    // It may have begun before this request, when the drive was worse: try again.
                    if own {
                        return Err(error);
                    }
                }
            }
        };
        state.counters.stall += since.elapsed();
        self.read_next(&mut state, index);
        Ok(held)
    }

    /// Puts the next streamed unit after `index` on its way, if a slot is free and nobody waits for
    /// one.
    fn read_next(&self, state: &mut RingState, index: usize) {
        if state.starved > 0 || !self.overlap {
            return;
        }
        let n = self.units.len();
        let next = (1..=n).map(|step| (index + step) % n).find(|&i| self.pinned[i].is_none());
        let Some(next) = next else { return };
        if next != index && state.slots.iter().all(|slot| slot.unit != next) {
            self.start(state, next, Priority::Next, index);
        }
    }

    /// Starts reading a unit into a free slot, or one whose unit nobody uses or waits for; not that
    /// of `spared`.
    fn start(
        &self,
        state: &mut RingState,
        index: usize,
        priority: Priority,
        spared: usize,
    ) -> bool {
        if state.spare.is_empty() {
            let idle = state.slots.iter().position(|slot| {
                let unused = matches!(&slot.stage, Stage::Ready(b) if Arc::strong_count(b) == 1);
                unused && state.waiting[slot.unit] == 0 && slot.unit != spared
            });
            let Some(idle) = idle else { return false };
            let Stage::Ready(bytes) = state.slots.swap_remove(idle).stage else {
                unreachable!("only units that are there are idle")
            };
            let bytes = Arc::into_inner(bytes).expect("nobody else has it");
            state.spare.push(bytes.buffer);
        }
        let Some(buffer) = state.spare.pop() else { return false };
        state.slots.push(Slot { unit: index, stage: Stage::Reading });
        let unit = self.units[index].clone();
        let placement = unit.placement.clone();
        state.counters.streamed_bytes += placement.bytes as u64;
        let (source, verify, ring) = (self.source.clone(), self.verify, self.ring.clone());
        let done = Box::new(move |buffer, result: Result<(), ReadError>| {
            let result = match result {
                Ok(()) => UnitBytes::new(unit, buffer, &*source, verify),
                Err(error) => Err(Box::new((buffer, unit.failed(error)))),
            };
            ring.arrive(index, result);
        });
        let _ticket = self.readers.submit(priority, buffer, &placement, done);
        true
    }
}

impl Unit {
    fn layer(source: &dyn WeightSource, layer: usize, matrices: Vec<StoredMatrix>) -> Self {
        let what = format!("layer {layer}");
        let places: Vec<_> = matrices.iter().map(|m| source.extents(&m.name)).collect();
        if let Some(run) = source.run(layer) {
            let placement = Placement::new(&[extent(run)]);
            let start = placement.parts[0].start;
            let within = |extent: DataExtent| {
                let first = start + (extent.offset - run.offset) as usize;
                first..first + extent.bytes as usize
            };
            let places = places.into_iter().map(|place| {
                let [codes, scales] = place.expect("a run holds its tensors");
                Place::Buffer(within(codes), within(scales))
            });
            let matrices = matrices.into_iter().zip(places).collect();
            return Self { what, run: Some(layer), sums: Vec::new(), placement, matrices };
        }
        Self::scattered(what, matrices, places)
    }

    /// Some rows of the head, and the parts of the files they are in.
    fn head(
        source: &dyn WeightSource,
        head: &StoredMatrix,
        rows: (usize, usize),
    ) -> (Self, Vec<DataExtent>) {
        let places = source.extents(&head.name);
        let places = places.map(|extents| extents.map(|extent| part(extent, head.rows, rows)));
        let what = format!("rows {} to {} of the head", rows.0, rows.0 + rows.1);
        let matrix = StoredMatrix { rows: rows.1, ..head.clone() };
        let parts = places.iter().flatten().filter(|part| part.bytes > 0).copied().collect();
        (Self::scattered(what, vec![matrix], vec![places]), parts)
    }

    fn scattered(
        what: String,
        matrices: Vec<StoredMatrix>,
        places: Vec<Option<[DataExtent; 2]>>,
    ) -> Self {
        let parts = places.iter().flatten().flatten().filter(|part| part.bytes > 0);
        let extents: Vec<Extent> = parts.map(|&part| extent(part)).collect();
        let placement = Placement::new(&extents);
        let mut parts = placement.parts.iter().cloned();
        let mut converted = 0;
        let mut place = |place: Option<[DataExtent; 2]>| match place {
            Some(extents) => {
                let [codes, scales] = extents.map(|extent| match extent.bytes {
                    0 => 0..0,
                    _ => parts.next().expect("one for each"),
                });
                Place::Buffer(codes, scales)
            }
            None => {
                converted += 1;
                Place::Converted(converted - 1)
            }
        };
        let matrices = matrices.into_iter().zip(places).map(|(m, p)| (m, place(p))).collect();
        Self { what, run: None, sums: Vec::new(), placement, matrices }
    }

    fn failed(&self, source: ReadError) -> Error {
        Error::Trunk { what: self.what.clone(), source: Arc::new(source) }
    }
}

/// Why a part of the head is refused.
const CHANGED: &str = "its bytes are not those that were checked when the model was opened; verify \
                       the folder and check the drive";

/// The part of a matrix's codes or scales that belongs to some of its rows.
fn part(extent: DataExtent, rows: usize, (first, n): (usize, usize)) -> DataExtent {
    let row_bytes = extent.bytes / rows.max(1) as u64;
    let offset = extent.offset + first as u64 * row_bytes;
    DataExtent { offset, bytes: n as u64 * row_bytes, ..extent }
}

/// Divides the head into pieces that fit a slot, of one row at least.
fn head_pieces(
    extents: [DataExtent; 2],
    head: &StoredMatrix,
    slot_bytes: usize,
) -> Vec<(usize, usize)> {
    let row_bytes = (extents[0].bytes + extents[1].bytes) as usize / head.rows.max(1);
    // Codes and scales are read apart, each with up to a block more at both ends.
    let room = slot_bytes.saturating_sub(4 * rill_stream::READ_ALIGN);
    let rows = (room / row_bytes.max(1)).clamp(1, head.rows.max(1));
    (0..head.rows).step_by(rows).map(|first| (first, rows.min(head.rows - first))).collect()
}

fn buffer(bytes: usize) -> Result<AlignedBuf, Error> {
    AlignedBuf::new(bytes).ok_or(Error::OutOfMemory { bytes: bytes as u64 })
}

/// A unit in use: its slot is not used for another as long as this lives.
pub(crate) struct Held {
    bytes: Option<Arc<UnitBytes>>,
    ring: Option<Arc<Ring>>,
}

impl Deref for Held {
    type Target = UnitBytes;

    fn deref(&self) -> &UnitBytes {
        self.bytes.as_ref().expect("taken only when dropped")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.bytes = None;
        if let Some(ring) = &self.ring {
            // Under the lock, so that nobody looks before and waits after.
            let _state = ring.lock();
            ring.arrived.notify_all();
        }
    }
}

struct Ring {
    state: Mutex<RingState>,
    /// A unit has come, or a slot may be free.
    arrived: Condvar,
}

struct RingState {
    spare: Vec<AlignedBuf>,
    /// Units in memory or on their way.
    slots: Vec<Slot>,
    /// Of each unit, requests that wait for it.
    waiting: Vec<u32>,
    /// Requests that wait for a slot.
    starved: u32,
    counters: TrunkCounters,
}

struct Slot {
    unit: usize,
    stage: Stage,
}

enum Stage {
    Reading,
    Ready(Arc<UnitBytes>),
    /// Its buffer has been given back.
    Failed(Error),
}

impl Ring {
    fn lock(&self) -> MutexGuard<'_, RingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, RingState>) -> MutexGuard<'a, RingState> {
        self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn arrive(&self, index: usize, result: Result<UnitBytes, Unread>) {
        let mut state = self.lock();
        let at = state.slots.iter().position(|slot| slot.unit == index);
        let at = at.expect("a unit that is being read has a slot");
        match result {
            Ok(bytes) => state.slots[at].stage = Stage::Ready(Arc::new(bytes)),
            Err(unread) => {
                let (buffer, error) = *unread;
                state.spare.push(buffer);
                // Nobody hears of a failure to read ahead; whoever wants the unit tries again.
                match state.waiting[index] {
                    0 => drop(state.slots.swap_remove(at)),
                    _ => state.slots[at].stage = Stage::Failed(error),
                }
            }
        }
        drop(state);
        self.arrived.notify_all();
    }
}
