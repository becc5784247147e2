//! Routed experts that come from disk just in time.

use std::error::Error as StdError;
use std::sync::Arc;

use rill_format::{DataExtent, DataFile, DataPlace};
use rill_stream::policy::{DecayedLfu, Learned, Lru, Scored};
use rill_stream::{
    CacheCounters, CacheOptions, DirectReads, Drive, DriveSpeed, ExpertCache, ExpertKey, Extent,
    FetchError, FileSpec, Geometry, Occupancy, Place, Placement, Policy, ReadError, ReadOptions,
    ReadTotals, Readers, Record, Records, Storage, probe,
};

use crate::config::ModelConfig;
use crate::error::{Error, ExpertError};
use crate::experts::{Expert, ExpertId, ExpertRecords, ExpertSource, LayerIdx, Values, moe_layers};
use crate::routing::geometry;

/// Which experts stay in memory when not all can.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CachePolicy {
    /// Those used last.
    Lru,
    /// Those used most often of late.
    Lfu,
    /// Those most likely to be used next, by their use over several spans of time.
    #[default]
    Scored,
}

impl CachePolicy {
    fn policy(self, geometry: Geometry, learned: Option<&Learned>) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(Lru::new(geometry)),
            Self::Lfu => Box::new(DecayedLfu::new(geometry)),
            Self::Scored => Box::new(match learned {
                Some(learned) => Scored::from_learned(learned),
                None => Scored::new(geometry),
            }),
        }
    }
}

/// How a model's files are read, and how fast that can be.
#[derive(Clone, Debug, PartialEq)]
pub struct DriveReport {
    /// Whether reads go past the operating system's page cache.
    pub direct: DirectReads,
    /// Threads that read.
    pub readers: usize,
    /// Longer reads are cut into pieces of this size.
    pub piece_bytes: usize,
    /// What the drive delivered when it was probed at opening; `None` where that was not done.
    pub probed_bytes_per_second: Option<f64>,
    /// Whether the drive is so slow that everything else will wait for it.
    pub is_slow: bool,
}

/// The model's files, open for streaming, and the threads that read them.
#[derive(Debug)]
pub(crate) struct Io {
    pub(crate) readers: Arc<Readers>,
    drive: Arc<Drive>,
    speed: Option<DriveSpeed>,
    options: ReadOptions,
}

impl Io {
    /// Opens the files. Without a number of `readers` the drive is asked how it likes to be read.
    pub(crate) fn open(
        files: &[DataFile],
        direct: bool,
        readers: Option<usize>,
        wrap: impl FnOnce(Arc<dyn Storage>) -> Arc<dyn Storage>,
    ) -> Result<Self, Error> {
        let specs: Vec<FileSpec> = files.iter().map(spec).collect();
        let drive = Arc::new(Drive::open(&specs, direct)?);
        let storage = wrap(drive.clone());
        let speed = if *drive.direct() == DirectReads::Yes && readers.is_none() {
            let sizes: Vec<u64> = specs.iter().map(|spec| spec.bytes).collect();
            probe(&storage, &sizes)?
        } else {
            // Through the page cache a probe would measure the cache.
            None
        };
        let mut options = speed.map_or_else(ReadOptions::default, |speed| speed.options);
        if let Some(threads) = readers {
            options.threads = threads;
        }
        let readers = Arc::new(Readers::new(storage, options)?);
        Ok(Self { readers, drive, speed, options })
    }

    /// How the files are read, and how fast the drive is.
    pub(crate) fn report(&self) -> DriveReport {
        DriveReport {
            direct: self.drive.direct().clone(),
            readers: self.options.threads,
            piece_bytes: self.options.piece_bytes,
            probed_bytes_per_second: self.speed.map(|speed| speed.bytes_per_second),
            is_slow: self.speed.is_some_and(|speed| speed.is_slow()),
        }
    }

    pub(crate) fn totals(&self) -> ReadTotals {
        self.readers.totals()
    }
}

fn spec(file: &DataFile) -> FileSpec {
    let place = match &file.place {
        DataPlace::Disk(path) => Place::Disk(path.clone()),
        DataPlace::Memory(bytes) => Place::Memory(bytes),
    };
    FileSpec { name: file.name.clone(), place, bytes: file.bytes }
}

/// An extent in the reader's words.
pub(crate) fn extent(extent: DataExtent) -> Extent {
    Extent { file: extent.file as u32, offset: extent.offset, bytes: extent.bytes }
}

/// How many experts are held and read ahead, and whether their checksums are checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertOptions {
    pub(crate) policy: CachePolicy,
    pub(crate) slots: usize,
    pub(crate) lookahead: usize,
    pub(crate) verify: bool,
    pub(crate) overlap: bool,
}

/// Delivers experts from a cache over the model's files.
pub(crate) struct StreamedExperts {
    cache: ExpertCache,
    records: Arc<dyn ExpertRecords>,
    layers: Arc<MoeLayers>,
}

/// The mixture layers: their place among all layers, and the other way round.
#[derive(Debug)]
struct MoeLayers {
    /// Of each mixture layer.
    layers: Vec<LayerIdx>,
    /// Of each layer of the model; `u32::MAX` for layers without experts.
    ranks: Vec<u32>,
}

impl StreamedExperts {
    pub(crate) fn new(
        io: &Io,
        records: Arc<dyn ExpertRecords>,
        config: &ModelConfig,
        options: ExpertOptions,
        learned: Option<&Learned>,
    ) -> Result<Self, Error> {
        let layers: Vec<LayerIdx> = moe_layers(config).map(LayerIdx).collect();
        let mut ranks = vec![u32::MAX; config.layers.len()];
        for (rank, layer) in (0..).zip(&layers) {
            ranks[layer.0] = rank;
        }
        let geometry = geometry(config);
        let layers = Arc::new(MoeLayers { layers, ranks });
        let top_k = config.moe.top_k.min(options.slots);
        let ahead = options.lookahead.min(options.slots - top_k);
        let sizes = CacheOptions {
            slots: options.slots,
            reserve: top_k + ahead,
            ahead,
            slot_bytes: slot_bytes(&*records, config),
            overlap: options.overlap,
        };
        let stored = Arc::new(Stored {
            records: records.clone(),
            layers: layers.clone(),
            verify: options.verify,
        });
        let policy = options.policy.policy(geometry, learned);
        let cache = ExpertCache::new(io.readers.clone(), stored, policy, sizes)?;
        if let Some(learned) = learned {
            cache.preload(learned.hottest(MAX_PRELOADED));
        }
        Ok(Self { cache, records, layers })
    }
}

/// Most records that are read before anything is asked for: reads that wait in a queue make it
/// slower to find others in it.
const MAX_PRELOADED: usize = 1024;

/// Bytes that the largest record takes in memory.
fn slot_bytes(records: &dyn ExpertRecords, config: &ModelConfig) -> usize {
    let mut most = 0;
    for layer in moe_layers(config).map(LayerIdx) {
        for expert in (0..config.moe.n_experts as u32).map(ExpertId) {
            let extents: Vec<Extent> =
                records.extents(layer, expert).into_iter().map(extent).collect();
            most = most.max(Placement::new(&extents).bytes);
        }
    }
    most
}

impl ExpertSource for StreamedExperts {
    fn fetch(
        &self,
        layer: LayerIdx,
        experts: &[ExpertId],
        consume: &mut dyn FnMut(ExpertId, Expert<'_>),
    ) -> Result<(), Error> {
        let ids: Vec<u32> = experts.iter().map(|expert| expert.0).collect();
        let mut failure = None;
        let fetched = self.cache.fetch(self.layers.ranks[layer.0], &ids, &mut |expert, record| {
            let expert = ExpertId(expert);
            if failure.is_some() {
                return;
            }
            match self.records.view(layer, expert, record, Values::Accepted) {
                Ok(view) => consume(expert, view),
                Err(source) => {
                    failure = Some(Error::Expert { layer, expert, source: Box::new(source) });
                }
            }
        });
        match (failure, fetched) {
            (Some(error), _) => Err(error),
            (None, Err(FetchError { key, source })) => {
                let source = Box::new(expert_error(source));
                Err(Error::Expert { layer, expert: ExpertId(key.expert), source })
            }
            (None, Ok(())) => Ok(()),
        }
    }

    fn chosen(&self, layer: LayerIdx, ids: &[u32], top_k: usize) {
        for ids in ids.chunks_exact(top_k) {
            self.cache.used(self.layers.ranks[layer.0], ids);
        }
    }

    fn likely(&self, layer: LayerIdx, experts: &[u32]) {
        let rank = self.layers.ranks[layer.0];
        if rank != u32::MAX {
            self.cache.hint(rank, experts.to_vec());
        }
    }

    fn learned(&self) -> Option<Learned> {
        self.cache.learned()
    }

    fn counters(&self) -> CacheCounters {
        self.cache.counters()
    }

    fn shrink(&self, slots: usize) -> usize {
        self.cache.shrink(slots)
    }

    fn occupancy(&self) -> Occupancy {
        self.cache.occupancy()
    }
}

/// What the format says is wrong, rather than that something is.
fn expert_error(source: Arc<ReadError>) -> ExpertError {
    match Arc::try_unwrap(source) {
        Ok(ReadError::Refused(error)) => match error.downcast() {
            Ok(error) => *error,
            Err(error) => ExpertError::Stream(Arc::new(ReadError::Refused(error))),
        },
        Ok(error) => ExpertError::Stream(Arc::new(error)),
        Err(shared) => ExpertError::Stream(shared),
    }
}

/// The records as the cache sees them.
struct Stored {
    records: Arc<dyn ExpertRecords>,
    layers: Arc<MoeLayers>,
    verify: bool,
}

impl Records for Stored {
    fn extents(&self, key: ExpertKey) -> Vec<Extent> {
        let layer = self.layers.layers[key.layer as usize];
        let extents = self.records.extents(layer, ExpertId(key.expert));
        extents.into_iter().map(extent).collect()
    }

    fn check(
        &self,
        key: ExpertKey,
        record: Record<'_>,
    ) -> Result<(), Box<dyn StdError + Send + Sync>> {
        let (layer, expert) = (self.layers.layers[key.layer as usize], ExpertId(key.expert));
        self.records.check(layer, expert, self.verify, record).map_err(ExpertError::Read)?;
        self.records.view(layer, expert, record, Values::Unseen)?;
        Ok(())
    }
}
