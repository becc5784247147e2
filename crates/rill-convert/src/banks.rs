//! The files of the banks, and where in them records lie.
//!
//! Records of one size have their places from the start. Where sizes differ, the records of a bank
//! follow one another in the order of the work, so that the bytes do not depend on how many work: a
//! record is written when its predecessor has been, and its header then says where the next one
//! begins. What an earlier process has written is found by going from header to header.

use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard};

use rill_format::container::{ALIGN, Bank, HEADER_BYTES, RecordLayout};

use crate::convert::stripe_path;
use crate::disk::OutFile;
use crate::error::ConvertError;
use crate::plan::Plan;

/// All banks of a conversion.
pub(crate) struct Banks(Vec<BankFiles>);

struct BankFiles {
    bank: Bank,
    /// Of the largest record there can be.
    layout: RecordLayout,
    /// One for each stripe.
    files: Vec<OutFile>,
    /// Where records differ in size.
    chain: Option<Chain>,
}

/// Records that follow one another.
struct Chain {
    /// Of each expert, the number of its turn.
    turns: Vec<usize>,
    placed: Mutex<Placed>,
    changed: Condvar,
}

struct Placed {
    /// Of those whose turn has been.
    places: Vec<Place>,
    /// Where the next one begins in each stripe.
    ends: Vec<u64>,
    /// Nobody need wait any longer.
    stopped: bool,
}

/// Where a record begins in each stripe, and its size.
#[derive(Clone)]
struct Place {
    starts: Vec<u64>,
    bytes: u64,
}

/// A record that is whole.
#[derive(Clone, Copy, Default)]
pub(crate) struct Whole {
    /// Of its payload.
    pub(crate) checksum: u64,
    /// Of gate, up and down.
    pub(crate) code_bytes: [u64; 3],
    /// Its size.
    pub(crate) bytes: u64,
}

impl Banks {
    /// Opens or makes the files, and forgets the records of which `stale` says so: where records differ
    /// in size, those that follow as well. `orders` has every bank's experts in the order of the work.
    pub(crate) fn open(
        folder: &Path,
        plan: &Plan,
        orders: &[Vec<u32>],
        stale: &dyn Fn(usize, u32) -> bool,
    ) -> Result<Self, ConvertError> {
        let mut banks = Vec::new();
        for (index, (bank, order)) in plan.banks().iter().zip(orders).enumerate() {
            let layout = plan.layout.clone().expect("banks have a layout");
            let paths = bank.stripes.iter().map(|stripe| stripe_path(folder, plan, stripe));
            let files = match layout.varies() {
                true => paths.map(OutFile::open_to_grow).collect::<Result<Vec<_>, _>>()?,
                false => {
                    let sized = paths.zip(bank.file_bytes());
                    sized
                        .map(|(path, bytes)| OutFile::open(path, bytes))
                        .collect::<Result<_, _>>()?
                }
            };
            let mut files = BankFiles { bank: bank.clone(), layout, files, chain: None };
            let stale = |expert: u32| stale(index, expert);
            match files.layout.varies() {
                true => files.chain = Some(files.walk(order, &stale)?),
                false => order
                    .iter()
                    .filter(|&&expert| stale(expert))
                    .try_for_each(|&expert| files.forget(expert))?,
            }
            banks.push(files);
        }
        Ok(Self(banks))
    }

    /// A record that is whole already.
    pub(crate) fn finished(&self, bank: usize, expert: u32) -> Result<Option<Whole>, ConvertError> {
        let files = &self.0[bank];
        match files.known_place(expert) {
            None => Ok(None),
            Some(place) => files.read(expert, &place),
        }
    }

    /// Writes a record, when its turn has come; false when [`stop`](Self::stop) has ended the waiting.
    pub(crate) fn write(
        &self,
        bank: usize,
        expert: u32,
        record: &[u8],
    ) -> Result<bool, ConvertError> {
        let files = &self.0[bank];
        let Some(chain) = &files.chain else {
            files.write(&files.fixed_place(expert), record)?;
            return Ok(true);
        };
        let turn = chain.turns[expert as usize];
        let mut placed = chain.lock();
        while turn > placed.places.len() && !placed.stopped {
            placed = chain.changed.wait(placed).expect("no worker panicked");
        }
        if placed.stopped {
            return Ok(false);
        }
        let bytes = record.len() as u64;
        if let Some(place) = placed.places.get(turn).cloned() {
            // Damaged, and made again.
            drop(placed);
            if place.bytes != bytes {
                return Err(ConvertError::Tensor {
                    tensor: format!("layer {}, expert {expert}", files.bank.layer),
                    reason: "is not what it was when its record was written, though the source's \
                             files look unchanged; remove the destination and convert again"
                        .to_owned(),
                });
            }
            files.write(&place, record)?;
            return Ok(true);
        }
        let place = Place { starts: placed.ends.clone(), bytes };
        // Nobody else's turn comes until this one's has passed. Written before that, so that whoever syncs a
        // record syncs what leads to it.
        drop(placed);
        files.write(&place, record)?;
        let mut placed = chain.lock();
        for (end, bytes) in placed.ends.iter_mut().zip(files.bank.divide(bytes)) {
            *end += bytes;
        }
        placed.places.push(place);
        chain.changed.notify_all();
        Ok(true)
    }

    /// Ends the waiting of all who wait for their turn.
    pub(crate) fn stop(&self) {
        for chain in self.0.iter().filter_map(|files| files.chain.as_ref()) {
            // Also when a worker has panicked.
            chain.placed.lock().unwrap_or_else(|e| e.into_inner()).stopped = true;
            chain.changed.notify_all();
        }
    }

    /// The files of one bank.
    pub(crate) fn files(&self, bank: usize) -> &[OutFile] {
        &self.0[bank].files
    }

    pub(crate) fn sync(&self) -> Result<(), ConvertError> {
        self.0.iter().flat_map(|files| &files.files).try_for_each(OutFile::sync)
    }

    /// What a manifest says of the places of each bank's records, when all have been written.
    pub(crate) fn places(&self) -> Vec<Option<Vec<[u64; 2]>>> {
        let unit = ALIGN as u64;
        let of_bank = |files: &BankFiles| {
            let chain = files.chain.as_ref()?;
            let placed = chain.lock();
            let places = chain.turns.iter().map(|&turn| &placed.places[turn]);
            let pair = |p: &Place| [p.starts.iter().sum::<u64>() / unit, p.bytes / unit];
            Some(places.map(pair).collect())
        };
        self.0.iter().map(of_bank).collect()
    }
}

impl Chain {
    fn lock(&self) -> MutexGuard<'_, Placed> {
        self.placed.lock().expect("no worker panicked")
    }
}

impl BankFiles {
    /// Goes from header to header as far as they are whole, and cuts off the rest. Payloads are looked at
    /// when their turn comes.
    fn walk(&self, order: &[u32], stale: &dyn Fn(u32) -> bool) -> Result<Chain, ConvertError> {
        let mut turns = vec![0; order.len()];
        for (turn, &expert) in order.iter().enumerate() {
            turns[expert as usize] = turn;
        }
        let (mut places, mut ends) = (Vec::new(), vec![0; self.files.len()]);
        let present = self.files[0].bytes()?;
        for &expert in order {
            let mut header = [0; HEADER_BYTES];
            if stale(expert) || ends[0] + HEADER_BYTES as u64 > present {
                break;
            }
            self.files[0].read_at(&mut header, ends[0])?;
            let Ok((own, _)) = self.layout.own(&header, self.bank.layer, expert) else { break };
            let bytes = own.record_bytes as u64;
            places.push(Place { starts: ends.clone(), bytes });
            for (end, bytes) in ends.iter_mut().zip(self.bank.divide(bytes)) {
                *end += bytes;
            }
        }
        for (file, &end) in self.files.iter().zip(&ends) {
            file.set_bytes(end)?;
        }
        let placed = Mutex::new(Placed { places, ends, stopped: false });
        Ok(Chain { turns, placed, changed: Condvar::new() })
    }

    fn fixed_place(&self, expert: u32) -> Place {
        let starts = self.bank.stripes.iter().map(|stripe| u64::from(expert) * stripe.bytes);
        Place { starts: starts.collect(), bytes: self.layout.record_bytes as u64 }
    }

    fn known_place(&self, expert: u32) -> Option<Place> {
        match &self.chain {
            None => Some(self.fixed_place(expert)),
            Some(chain) => chain.lock().places.get(chain.turns[expert as usize]).cloned(),
        }
    }

    /// Each file with the first byte and the number of bytes of a record's part.
    fn parts<'a>(&'a self, place: &'a Place) -> impl Iterator<Item = (&'a OutFile, u64, usize)> {
        let parts = place.starts.iter().zip(self.bank.divide(place.bytes));
        self.files.iter().zip(parts).map(|(file, (&start, bytes))| (file, start, bytes as usize))
    }

    fn read(&self, expert: u32, place: &Place) -> Result<Option<Whole>, ConvertError> {
        let mut record = vec![0; place.bytes as usize];
        let mut rest = &mut record[..];
        for (index, (file, position, bytes)) in self.parts(place).enumerate() {
            let (part, after) = rest.split_at_mut(bytes);
            // Most records of a fresh file are zeros: the start tells without reading the rest.
            let start = part.len().min(HEADER_BYTES);
            file.read_at(&mut part[..start], position)?;
            if part[..start].iter().all(|&b| b == 0) && index == 0 {
                return Ok(None);
            }
            file.read_at(part, position)?;
            rest = after;
        }
        Ok(whole(&self.layout, &record, self.bank.layer, expert, true))
    }

    fn write(&self, place: &Place, record: &[u8]) -> Result<(), ConvertError> {
        let mut rest = record;
        for (file, position, bytes) in self.parts(place) {
            let (part, after) = rest.split_at(bytes);
            file.write_at(part, position)?;
            rest = after;
        }
        Ok(())
    }

    /// Makes a record of a known place look as if it had not been written.
    fn forget(&self, expert: u32) -> Result<(), ConvertError> {
        let position = u64::from(expert) * self.bank.stripes[0].bytes;
        self.files[0].write_at(&[0; HEADER_BYTES], position)
    }
}

/// What is to be known of a record, if it is one; `payload` says whether that is looked at too.
pub(crate) fn whole(
    layout: &RecordLayout,
    record: &[u8],
    layer: u32,
    expert: u32,
    payload: bool,
) -> Option<Whole> {
    let checksum = layout.check(record, layer, expert, payload).ok()?;
    let (own, _) = layout.own(record, layer, expert).ok()?;
    let code_bytes = own.matrices.each_ref().map(|matrix| matrix.code_bytes);
    Some(Whole { checksum, code_bytes, bytes: own.record_bytes as u64 })
}
