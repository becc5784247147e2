//! An open checkpoint: every tensor's name, type, shape and place, in a compact form.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{PoisonError, RwLock};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::header::parse_header;
use crate::index::read_index;
use crate::read_at::Source;
use crate::tensor::size_bytes;
use crate::{
    DataExtent, DataFile, Dtype, Folder, FormatError, HeaderEntry, Shape, TensorId, TensorInfo,
};

/// A Hugging Face checkpoint whose headers have been read and checked. Immutable and shared
/// between threads; its files stay open, so replacing them on disk does not mix two versions.
#[derive(Debug)]
pub struct Checkpoint {
    folder: Folder,
    shards: Vec<Shard>,
    n_tensors: u32,
    payload_bytes: u64,
    /// Ids by name. The names themselves are in the shards.
    ids: HashTable<u32>,
    // Keyed at random: a hostile checkpoint cannot choose names that collide.
    hasher: RandomState,
}

/// What a shard can be known by when it is no longer there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShardHeader {
    /// Bytes of the whole file.
    pub file_bytes: u64,
    /// Its header, without the length field in front.
    pub header: Vec<u8>,
}

impl Checkpoint {
    /// Opens `model.safetensors.index.json` and the shards it names, or else a lone
    /// `model.safetensors`. Reads headers only.
    ///
    /// # Errors
    ///
    /// If files are missing or cut off, if a header or the index breaks any rule of its format,
    /// or if index and shards disagree about even one tensor.
    pub fn open(folder: Folder) -> Result<Self, FormatError> {
        Self::open_without(folder, &HashMap::new())
    }

    /// Opens a checkpoint from which shards may be missing whose headers are known, by name. All
    /// tensors are there; reading one of a missing shard is an error.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open); a known header breaks the rules like one in a file.
    pub fn open_without(
        folder: Folder,
        known: &HashMap<String, ShardHeader>,
    ) -> Result<Self, FormatError> {
        let mut checkpoint = Self {
            folder,
            shards: Vec::new(),
            n_tensors: 0,
            payload_bytes: 0,
            ids: HashTable::new(),
            hasher: RandomState::new(),
        };
        if checkpoint.folder.exists(INDEX) {
            checkpoint.add_indexed_shards(known)?;
        } else if checkpoint.folder.exists(LONE_SHARD) || known.contains_key(LONE_SHARD) {
            checkpoint.add_shard(LONE_SHARD, known)?;
        } else {
            return Err(FormatError::NoCheckpoint { folder: checkpoint.folder.describe_folder() });
        }
        Ok(checkpoint)
    }

    /// Where the files come from.
    pub fn folder(&self) -> &Folder {
        &self.folder
    }

    /// The tensor of this name.
    pub fn find(&self, name: &str) -> Option<TensorInfo<'_>> {
        self.find_id(name).map(|id| self.info(TensorId(id)))
    }

    /// The tensor of this name, which the model cannot do without.
    ///
    /// # Errors
    ///
    /// [`FormatError::MissingTensor`].
    pub fn require(&self, name: &str) -> Result<TensorInfo<'_>, FormatError> {
        self.find(name).ok_or_else(|| FormatError::MissingTensor {
            tensor: name.to_owned(),
            folder: self.folder.describe_folder(),
            tensors: self.len(),
        })
    }

    /// The tensor with this id.
    ///
    /// # Panics
    ///
    /// If the id comes from another checkpoint and is out of range here.
    pub fn info(&self, id: TensorId) -> TensorInfo<'_> {
        let (shard, i) = locate(&self.shards, id.0);
        let dtype = shard.places[i].dtype;
        let shape = Shape::new(shard.dims(i)).expect("the header parser bounds the rank");
        TensorInfo {
            id,
            name: shard.tensor_name(i),
            dtype,
            shape,
            bytes: size_bytes(dtype, &shape).expect("the header parser bounds the size"),
            shard: &shard.name,
        }
    }

    /// All tensors, shard by shard, in file order within each.
    pub fn iter(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        (0..self.n_tensors).map(|id| self.info(TensorId(id)))
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.n_tensors as usize
    }

    /// Whether there are no tensors at all.
    pub fn is_empty(&self) -> bool {
        self.n_tensors == 0
    }

    /// Bytes of all tensors together.
    pub fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// File names of the shards, in the order the index first names them.
    pub fn shards(&self) -> impl Iterator<Item = &str> {
        self.shards.iter().map(|shard| shard.name.as_str())
    }

    /// Reads a shard's header again, to be kept for [`open_without`](Self::open_without).
    ///
    /// # Errors
    ///
    /// If there is no such shard or its file is gone or closed, and as for [`open`](Self::open).
    pub fn shard_header(&self, shard: &str) -> Result<ShardHeader, FormatError> {
        let missing = || self.folder.missing(shard);
        let found = self.shards.iter().find(|s| s.name == shard).ok_or_else(missing)?;
        let source = found.source.read().unwrap_or_else(PoisonError::into_inner);
        let source = source.as_ref().ok_or_else(missing)?;
        let (header, payload_at, payload_bytes) = self.read_header(shard, source)?;
        Ok(ShardHeader { file_bytes: payload_at + payload_bytes, header })
    }

    /// Closes a shard's file, so that deleting it frees its bytes; reading from it is an error
    /// from then on. A shard that is not open is left as it is.
    pub fn close_shard(&self, shard: &str) {
        for shard in self.shards.iter().filter(|s| s.name == shard) {
            *shard.source.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// The shards, to which [`extent`](Self::extent) refers.
    pub fn data_files(&self) -> Vec<DataFile> {
        let file = |shard: &Shard| DataFile::new(&self.folder, &shard.name, shard.file_bytes);
        self.shards.iter().map(file).collect()
    }

    /// Where a tensor's bytes lie.
    ///
    /// # Panics
    ///
    /// If the id comes from another checkpoint and is out of range here.
    pub fn extent(&self, id: TensorId) -> DataExtent {
        let file = self.shards.partition_point(|shard| shard.first_id <= id.0) - 1;
        let offset =
            self.shards[file].places[(id.0 - self.shards[file].first_id) as usize].position;
        DataExtent { file, offset, bytes: self.info(id).bytes }
    }

    /// Reads a tensor's bytes; `out` must have exactly its size.
    ///
    /// # Errors
    ///
    /// If `out` has another size, if the file shrank since it was opened, or if the disk fails.
    pub fn read_into(&self, id: TensorId, out: &mut [u8]) -> Result<(), FormatError> {
        let info = self.info(id);
        if out.len() as u64 != info.bytes {
            return Err(self.bad_range(&info, 0, out.len()));
        }
        self.read_range_into(id, 0, out)
    }

    /// Reads a tensor's bytes into a new buffer.
    ///
    /// # Errors
    ///
    /// As [`read_into`](Self::read_into), and if there is no memory for the buffer.
    pub fn read(&self, id: TensorId) -> Result<Vec<u8>, FormatError> {
        let info = self.info(id);
        let mut out = Vec::new();
        let n = usize::try_from(info.bytes).unwrap_or(usize::MAX);
        out.try_reserve_exact(n).map_err(|_| FormatError::OutOfMemory {
            shard: self.folder.describe(info.shard),
            tensor: info.name.to_owned(),
            bytes: info.bytes,
        })?;
        out.resize(n, 0);
        self.read_into(id, &mut out)?;
        Ok(out)
    }

    /// Reads part of a tensor, such as one row of an embedding: `out.len()` bytes from byte
    /// `start` of it.
    ///
    /// # Errors
    ///
    /// If the part is not inside the tensor, if the file shrank since it was opened, or if the
    /// disk fails.
    pub fn read_range_into(
        &self,
        id: TensorId,
        start: u64,
        out: &mut [u8],
    ) -> Result<(), FormatError> {
        let info = self.info(id);
        let end = start.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > info.bytes) {
            return Err(self.bad_range(&info, start, out.len()));
        }
        let (shard, i) = locate(&self.shards, id.0);
        let position = shard.places[i].position + start;
        let source = shard.source.read().unwrap_or_else(PoisonError::into_inner);
        let Some(source) = source.as_ref() else {
            let (shard, tensor) = (self.folder.describe(info.shard), info.name.to_owned());
            return Err(FormatError::ShardGone { shard, tensor });
        };
        source.read_exact_at(out, position).map_err(|stopped| {
            let shard = self.folder.describe(info.shard);
            let tensor = info.name.to_owned();
            let byte = position + stopped.filled as u64;
            match stopped.error {
                Some(source) => FormatError::ReadFailed { shard, tensor, byte, source },
                None => FormatError::ShortRead {
                    shard,
                    tensor,
                    byte,
                    expected: out.len() as u64,
                    found: stopped.filled as u64,
                },
            }
        })
    }

    fn find_id(&self, name: &str) -> Option<u32> {
        let hash = self.hasher.hash_one(name);
        self.ids.find(hash, |&id| name_of(&self.shards, id) == name).copied()
    }

    fn bad_range(&self, info: &TensorInfo<'_>, start: u64, found: usize) -> FormatError {
        FormatError::BadRange {
            shard: self.folder.describe(info.shard),
            tensor: info.name.to_owned(),
            start,
            found: found as u64,
            bytes: info.bytes,
        }
    }

    /// One pass over the index: shards are opened when it first names them, and every line is
    /// looked up in the shard it points at.
    fn add_indexed_shards(
        &mut self,
        known: &HashMap<String, ShardHeader>,
    ) -> Result<(), FormatError> {
        let (stream, index_bytes) = self.folder.stream(INDEX, MAX_INDEX_BYTES)?;
        // Growing the table hashes every name again; a line of a real index has about this size.
        self.ids.reserve(index_bytes as usize / INDEX_LINE_BYTES, |_| unreachable!("it is empty"));
        let mut placing = Placing {
            index: self.folder.describe(INDEX),
            shard_numbers: HashMap::new(),
            named: Vec::new(),
            misplaced: None,
            known,
            checkpoint: self,
        };
        let index = placing.index.clone();
        read_index(stream, &index, |tensor, shard| placing.place(tensor, shard))?;
        placing.finish()
    }

    /// Reads and checks a shard's header and appends its tensors.
    fn add_shard(
        &mut self,
        name: &str,
        known: &HashMap<String, ShardHeader>,
    ) -> Result<(), FormatError> {
        let described = self.folder.describe(name);
        let (source, entries, payload_at, payload_bytes) = match known.get(name) {
            Some(ShardHeader { file_bytes, header }) if !self.folder.exists(name) => {
                let payload_at = 8 + header.len() as u64;
                let payload_bytes = file_bytes.checked_sub(payload_at);
                let payload_bytes = payload_bytes.ok_or_else(|| FormatError::HeaderCutOff {
                    shard: described.clone(),
                    expected: payload_at,
                    found: *file_bytes,
                })?;
                let entries = parse_header(&described, header, payload_bytes)?;
                (None, entries, payload_at, payload_bytes)
            }
            _ => {
                let source = self.folder.open(name)?;
                let (header, payload_at, payload_bytes) = self.read_header(name, &source)?;
                let entries = parse_header(&described, &header, payload_bytes)?;
                (Some(source), entries, payload_at, payload_bytes)
            }
        };

        let first_id = self.n_tensors;
        let n_tensors = u32::try_from(entries.len())
            .ok()
            .and_then(|n| first_id.checked_add(n))
            .ok_or(FormatError::TooManyTensors { shard: described, max: u32::MAX })?;
        let shard =
            Shard::new(name, source, first_id, payload_at, payload_at + payload_bytes, &entries);
        self.shards.push(shard);
        self.n_tensors = n_tensors;
        self.payload_bytes = self.payload_bytes.saturating_add(payload_bytes);

        let shards = &self.shards;
        for id in first_id..n_tensors {
            let name = name_of(shards, id);
            let entry = self.ids.entry(
                self.hasher.hash_one(name),
                |&other| name_of(shards, other) == name,
                |&other| self.hasher.hash_one(name_of(shards, other)),
            );
            match entry {
                Entry::Vacant(place) => {
                    place.insert(id);
                }
                Entry::Occupied(other) => {
                    let shard_of = |id| self.folder.describe(&locate(shards, id).0.name);
                    return Err(FormatError::DuplicateTensor {
                        tensor: name.to_owned(),
                        shard: shard_of(*other.get()),
                        other: shard_of(id),
                    });
                }
            }
        }
        Ok(())
    }

    /// A shard's header, the position of its payload, and the payload's size.
    fn read_header(&self, name: &str, source: &Source) -> Result<(Vec<u8>, u64, u64), FormatError> {
        let cut_off = |expected, found| FormatError::HeaderCutOff {
            shard: self.folder.describe(name),
            expected,
            found,
        };
        let read = |out: &mut [u8], position| {
            let expected = position + out.len() as u64;
            source.read_exact_at(out, position).map_err(|stopped| match stopped.error {
                Some(error) => self.folder.io_error(name, "reading its header", error),
                None => cut_off(expected, position + stopped.filled as u64),
            })
        };

        let file_bytes =
            source.len().map_err(|error| self.folder.io_error(name, "taking its size", error))?;
        let mut length = [0; 8];
        read(&mut length, 0)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES {
            return Err(FormatError::HeaderTooLarge {
                shard: self.folder.describe(name),
                found: header_bytes,
                max_bytes: MAX_HEADER_BYTES,
            });
        }
        let payload_at = 8 + header_bytes;
        let payload_bytes =
            file_bytes.checked_sub(payload_at).ok_or_else(|| cut_off(payload_at, file_bytes))?;
        let mut header = vec![0; header_bytes as usize];
        read(&mut header, 8)?;
        Ok((header, payload_at, payload_bytes))
    }
}

const INDEX: &str = "model.safetensors.index.json";
const LONE_SHARD: &str = "model.safetensors";

/// K3's index: 60 MB for 497,220 lines.
const INDEX_LINE_BYTES: usize = 120;

/// Room for four times K3's tensors.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// The format's own bound on a header.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The state of one pass over the index.
struct Placing<'a> {
    checkpoint: &'a mut Checkpoint,
    index: String,
    shard_numbers: HashMap<String, usize>,
    /// By tensor id: whether the index has named it.
    named: Vec<bool>,
    /// The first tensor that is not where the index says, and where that is. Judged at the end,
    /// when all shards are known.
    misplaced: Option<(String, usize)>,
    /// Headers of shards that may be missing.
    known: &'a HashMap<String, ShardHeader>,
}

impl Placing<'_> {
    /// One line of the index.
    fn place(&mut self, tensor: &str, shard: &str) -> Result<(), FormatError> {
        let number = match self.shard_numbers.get(shard) {
            Some(&number) => number,
            None => self.add_shard(tensor, shard)?,
        };
        let shard = &self.checkpoint.shards[number];
        match self.checkpoint.find_id(tensor) {
            Some(id) if shard.ids().contains(&id) => {
                let named = &mut self.named[id as usize];
                if *named {
                    return Err(FormatError::IndexedTwice {
                        index: self.index.clone(),
                        tensor: tensor.to_owned(),
                    });
                }
                *named = true;
            }
            _ => {
                self.misplaced.get_or_insert_with(|| (tensor.to_owned(), number));
            }
        }
        Ok(())
    }

    fn add_shard(&mut self, tensor: &str, shard: &str) -> Result<usize, FormatError> {
        if !is_plain_file_name(shard) {
            return Err(FormatError::BadShardName {
                index: self.index.clone(),
                tensor: tensor.to_owned(),
                shard: shard.to_owned(),
            });
        }
        let number = self.checkpoint.shards.len();
        self.checkpoint.add_shard(shard, self.known).map_err(|error| match error {
            FormatError::MissingFile { file } => FormatError::MissingShard {
                index: self.index.clone(),
                shard: file,
                tensor: tensor.to_owned(),
            },
            other => other,
        })?;
        self.shard_numbers.insert(shard.to_owned(), number);
        self.named.resize(self.checkpoint.len(), false);
        Ok(number)
    }

    /// What only shows when the whole index has been read.
    fn finish(self) -> Result<(), FormatError> {
        let describe = |shard: &str| self.checkpoint.folder.describe(shard);
        if let Some((tensor, number)) = self.misplaced {
            let found = self.checkpoint.find(&tensor);
            let found = found.map(|info| describe(info.shard));
            let shard = describe(&self.checkpoint.shards[number].name);
            let index = self.index;
            return Err(match found {
                Some(found) => FormatError::WrongShard { index, tensor, shard, found },
                None => FormatError::IndexedTensorMissing { index, tensor, shard },
            });
        }
        let unnamed = self.checkpoint.iter().zip(&self.named);
        match unnamed.into_iter().find(|(_, named)| !**named) {
            Some((info, _)) => Err(FormatError::UnindexedTensor {
                index: self.index,
                tensor: info.name.to_owned(),
                shard: describe(info.shard),
            }),
            None => Ok(()),
        }
    }
}

/// A shard's tensors, in file order. Names and dimensions lie end to end; K3's half a million
/// tensors have no allocation of their own.
#[derive(Debug)]
struct Shard {
    name: String,
    /// `None` when the file is gone or closed.
    source: RwLock<Option<Source>>,
    file_bytes: u64,
    first_id: u32,
    names: Box<str>,
    dims: Box<[u64]>,
    places: Box<[Place]>,
}

/// One tensor. Its name and dimensions start where the tensor's before it end.
#[derive(Debug)]
struct Place {
    /// First byte, counted from the start of the file.
    position: u64,
    name_end: u32,
    dims_end: u32,
    dtype: Dtype,
}

impl Shard {
    fn new(
        name: &str,
        source: Option<Source>,
        first_id: u32,
        payload_at: u64,
        file_bytes: u64,
        entries: &[HeaderEntry],
    ) -> Self {
        // Sized first: growth by doubling would cost more than everything else here.
        let mut names = String::with_capacity(entries.iter().map(|e| e.name.len()).sum());
        let mut dims = Vec::with_capacity(entries.iter().map(|e| e.shape.len()).sum());
        let mut places = Vec::with_capacity(entries.len());
        for entry in entries {
            names.push_str(&entry.name);
            dims.extend_from_slice(&entry.shape);
            places.push(Place {
                position: payload_at + entry.begin,
                // Both are below the header's size, which is bounded by 100 MB.
                name_end: names.len() as u32,
                dims_end: dims.len() as u32,
                dtype: entry.dtype,
            });
        }
        Self {
            name: name.to_owned(),
            source: RwLock::new(source),
            file_bytes,
            first_id,
            names: names.into_boxed_str(),
            dims: dims.into_boxed_slice(),
            places: places.into_boxed_slice(),
        }
    }

    fn ids(&self) -> std::ops::Range<u32> {
        self.first_id..self.first_id + self.places.len() as u32
    }

    fn tensor_name(&self, i: usize) -> &str {
        let start = i.checked_sub(1).map_or(0, |i| self.places[i].name_end);
        &self.names[start as usize..self.places[i].name_end as usize]
    }

    fn dims(&self, i: usize) -> &[u64] {
        let start = i.checked_sub(1).map_or(0, |i| self.places[i].dims_end);
        &self.dims[start as usize..self.places[i].dims_end as usize]
    }
}

/// The shard that holds a tensor, and the tensor's place in it.
fn locate(shards: &[Shard], id: u32) -> (&Shard, usize) {
    // Of several shards with the same first id all but the last are empty.
    let after = shards.partition_point(|shard| shard.first_id <= id);
    let shard = &shards[after - 1];
    (shard, (id - shard.first_id) as usize)
}

fn name_of(shards: &[Shard], id: u32) -> &str {
    let (shard, i) = locate(shards, id);
    shard.tensor_name(i)
}

/// Whether a name stays inside its folder on every platform: no separators, no drive or stream
/// (`C:x`), no parent, nothing unprintable.
fn is_plain_file_name(name: &str) -> bool {
    let plain = |c: char| !matches!(c, '/' | '\\' | ':') && !c.is_control();
    !matches!(name, "" | "." | "..") && name.chars().all(plain)
}
