//! Sessions in files.
//!
//! A file appears whole or not at all, so an interrupted save leaves the file that was there before. It
//! is for the model that wrote it, and for no other: its latents and states mean nothing to other weights. All numbers are little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `RILLSESS` |
//! | 4 | version, 1 |
//! | 4 | length of the head |
//! | head | JSON: `model`, `tokens` (how many), `note` (the caller's), `latents` (`f16` or `bf16`; else f32) |
//! | 4 each | the tokens |
//! | 4 each | of each layer: a KDA layer's heads, then q, k and v convolution inputs; an MLA layer's cache (2 each as halves) |
//! | 8 | XXH3-64 of all that comes before |

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;

use rill_format::container::Checksum;
use rill_format::{DataFile, DataPlace};
use rill_kernels::{LatentCache, LatentFormat};
use rill_stream::{Access, StreamError, write_whole};
use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::error::Error;
use crate::session::{LayerState, Session};
use crate::source;

const MAGIC: &[u8; 8] = b"RILLSESS";
const VERSION: u32 = 1;
/// Longest head that makes sense.
const MAX_HEAD_BYTES: u32 = 16 << 20;
/// Values converted at a time.
const BLOCK: usize = 1 << 14;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    model: String,
    tokens: usize,
    note: String,
    /// How latents are kept; absent means f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    latents: Option<String>,
}

impl Engine {
    /// Writes a session to a file, which appears whole or not at all, readable by its owner alone.
    /// `note` is the caller's and comes back with it.
    ///
    /// # Errors
    /// [`Error::ForeignSession`]; or when the disk does not take it: an older file of this name then
    /// stays as it was.
    pub fn save_session(&self, session: &Session, path: &Path, note: &str) -> Result<(), Error> {
        if !session.belongs_to(&self.home) {
            return Err(Error::ForeignSession);
        }
        let (model, latents) = (self.model_identity()?, self.home.latents);
        write_session(path, model, latents, session.tokens(), &session.layers, note)
    }

    /// Reads a session that [`save_session`](Self::save_session) wrote, and its note. It goes on with
    /// the bits it would have gone on with then.
    ///
    /// # Errors
    /// [`Error::SessionFile`] when the file is damaged, cut off, of another model or of another version
    /// of Rill; [`Error::OverBudget`] when there is no room for the session, [`Error::ContextFull`] when
    /// it is longer than the context this engine was opened with.
    pub fn load_session(&self, path: &Path) -> Result<(Session, String), Error> {
        let mut session = self.new_session();
        let note = self.read_session(path, &self.model_identity()?, &mut session, |_, _| true)?;
        Ok((session, note))
    }

    /// Reads a file's session into one that has seen nothing, and still has after an error; returns the
    /// note. It must be of this model, and `accept` is asked about its tokens and its note.
    pub(crate) fn read_session(
        &self,
        path: &Path,
        model: &str,
        session: &mut Session,
        accept: impl FnOnce(&[u32], &str) -> bool,
    ) -> Result<String, Error> {
        let read = self.read_uncommitted(path, model, session, accept);
        let (tokens, note) = read.inspect_err(|_| session.roll_back())?;
        session.commit(&tokens, Arc::default());
        Ok(note)
    }

    fn read_uncommitted(
        &self,
        path: &Path,
        model: &str,
        session: &mut Session,
        accept: impl FnOnce(&[u32], &str) -> bool,
    ) -> Result<(Vec<u32>, String), Error> {
        let (mut input, head, head_bytes) = Input::open(path)?;
        if head.model != model {
            return Err(input.wrong("its model", model, head.model));
        }
        let latents = head.latents.as_deref().unwrap_or(LatentFormat::F32.name());
        if latents != self.home.latents.name() {
            return Err(input.wrong("its latents", self.home.latents, latents));
        }
        let max_positions = self.plan.options.context;
        if head.tokens > max_positions {
            return Err(Error::ContextFull { positions: head.tokens, max_positions });
        }
        session.admit()?;
        session.resize(head.tokens);
        let values: usize = session.layers.iter().flat_map(parts).map(Values::bytes).sum();
        let expected = 16 + head_bytes + (4 * head.tokens + values) as u64 + 8;
        if input.bytes != expected {
            return Err(input.wrong("its length", format!("{expected} bytes"), input.bytes));
        }

        let mut tokens = vec![0; head.tokens];
        input.read_words(&mut tokens, u32::from_le_bytes)?;
        if !accept(&tokens, &head.note) {
            return Err(input.wrong("it", "what was looked for", "something else"));
        }
        for layer in &mut session.layers {
            for values in parts_mut(layer) {
                match values {
                    ValuesMut::F32(values) => input.read_words(values, f32::from_le_bytes)?,
                    ValuesMut::Halves(bits) => input.read_words(bits, u16::from_le_bytes)?,
                }
            }
        }
        let found = input.sum.finish();
        let mut sum = [0; 8];
        input.read(&mut sum)?;
        if u64::from_le_bytes(sum) != found {
            let (expected, found) = (u64::from_le_bytes(sum), format!("{found:016x}"));
            return Err(input.wrong("its checksum", format!("{expected:016x}"), found));
        }
        let vocab_size = self.config.vocab_size;
        if let Some(position) = tokens.iter().position(|&t| t as usize >= vocab_size) {
            return Err(Error::TokenOutOfRange { token: tokens[position], position, vocab_size });
        }
        Ok((tokens, head.note))
    }

    /// Names the weights: a container's fingerprint, or a digest of all names, formats and shapes and of
    /// samples of each file.
    pub(crate) fn model_identity(&self) -> Result<String, Error> {
        let identity = source::identity(&*self.source);
        match self.source.fingerprint() {
            Some(_) => Ok(identity),
            None => Ok(format!("{identity}-{:016x}", samples(&self.source.data_files())?)),
        }
    }
}

/// Reads the note of a session's file, without a model and without the rest: only loading the session
/// tells whether the file is whole.
///
/// # Errors
/// [`Error::SessionFile`] when the file begins otherwise than a session of this version of Rill.
pub fn read_session_note(path: &Path) -> Result<String, Error> {
    let (_, head, _) = Input::open(path)?;
    Ok(head.note)
}

/// Writes a session's file, readable by its owner alone: it has a conversation in it.
pub(crate) fn write_session(
    path: &Path,
    model: String,
    latents: LatentFormat,
    tokens: &[u32],
    layers: &[LayerState],
    note: &str,
) -> Result<(), Error> {
    let head = Head {
        model,
        tokens: tokens.len(),
        note: note.to_owned(),
        latents: Some(latents)
            .filter(|format| *format != LatentFormat::F32)
            .map(|format| format.name().to_owned()),
    };
    Ok(write_whole(path, Access::Owner, |out| write(out, &head, tokens, layers))?)
}

fn write(
    out: &mut dyn Write,
    head: &Head,
    tokens: &[u32],
    layers: &[LayerState],
) -> io::Result<()> {
    let mut out = Output { file: out, sum: Checksum::default() };
    let head = serde_json::to_vec(head)?;
    let head_bytes = u32::try_from(head.len()).ok().filter(|n| *n <= MAX_HEAD_BYTES);
    let head_bytes = head_bytes.ok_or_else(|| io::Error::other("the note is too long"))?;
    out.write(MAGIC)?;
    out.write(&VERSION.to_le_bytes())?;
    out.write(&head_bytes.to_le_bytes())?;
    out.write(&head)?;
    out.write_words(tokens, |token| token.to_le_bytes())?;
    for values in layers.iter().flat_map(parts) {
        match values {
            Values::F32(values) => out.write_words(values, |value| value.to_le_bytes())?,
            Values::Halves(bits) => out.write_words(bits, |bits| bits.to_le_bytes())?,
        }
    }
    let sum = out.sum.finish().to_le_bytes();
    out.file.write_all(&sum)
}

enum Values<'a> {
    F32(&'a [f32]),
    Halves(&'a [u16]),
}

enum ValuesMut<'a> {
    F32(&'a mut [f32]),
    Halves(&'a mut [u16]),
}

impl Values<'_> {
    fn bytes(self) -> usize {
        match self {
            Self::F32(values) => 4 * values.len(),
            Self::Halves(bits) => 2 * bits.len(),
        }
    }
}

/// What of a layer is in a file.
fn parts(layer: &LayerState) -> Vec<Values<'_>> {
    match layer {
        LayerState::Kda(state) => {
            let all = [&state.now.heads].into_iter().chain(&state.now.conv);
            all.map(|values| Values::F32(values)).collect()
        }
        LayerState::Mla(state) => vec![match &state.cache {
            LatentCache::F32(values) => Values::F32(values),
            LatentCache::F16(bits) | LatentCache::Bf16(bits) => Values::Halves(bits),
        }],
    }
}

/// Where it is read to: a session that has just been read commits it, as it does a step.
fn parts_mut(layer: &mut LayerState) -> Vec<ValuesMut<'_>> {
    match layer {
        LayerState::Kda(state) => {
            let all = [&mut state.next.heads].into_iter().chain(&mut state.next.conv);
            all.map(|values| ValuesMut::F32(values)).collect()
        }
        LayerState::Mla(state) => vec![match &mut state.cache {
            LatentCache::F32(values) => ValuesMut::F32(values),
            LatentCache::F16(bits) | LatentCache::Bf16(bits) => ValuesMut::Halves(bits),
        }],
    }
}

/// A checksum of a few pieces of each file.
fn samples(files: &[DataFile]) -> Result<u64, Error> {
    const SAMPLES: u64 = 16;
    const BYTES: u64 = 4096;
    let mut sum = Checksum::default();
    for file in files {
        sum.update(&file.bytes.to_le_bytes());
        let length = BYTES.min(file.bytes);
        for sample in 0..SAMPLES {
            let at = (file.bytes - length) / (SAMPLES - 1) * sample;
            let mut bytes = vec![0; length as usize];
            match &file.place {
                DataPlace::Memory(all) => {
                    bytes.copy_from_slice(&all[at as usize..(at + length) as usize]);
                }
                DataPlace::Disk(path) => {
                    let read = File::open(path).and_then(|mut file| {
                        file.seek(SeekFrom::Start(at))?;
                        file.read_exact(&mut bytes)
                    });
                    read.map_err(|source| StreamError::Io {
                        file: path.clone(),
                        doing: "reading",
                        source,
                    })?;
                }
            }
            sum.update(&bytes);
        }
    }
    Ok(sum.finish())
}

struct Output<'a> {
    file: &'a mut dyn Write,
    sum: Checksum,
}

impl Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.sum.update(bytes);
        self.file.write_all(bytes)
    }

    fn write_words<T, const N: usize>(
        &mut self,
        values: &[T],
        word: impl Fn(&T) -> [u8; N],
    ) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(N * BLOCK.min(values.len()));
        for values in values.chunks(BLOCK) {
            bytes.clear();
            bytes.extend(values.iter().flat_map(&word));
            self.write(&bytes)?;
        }
        Ok(())
    }
}

struct Input<'a> {
    path: &'a Path,
    bytes: u64,
    file: BufReader<File>,
    sum: Checksum,
}

impl<'a> Input<'a> {
    /// Opens a session's file and reads its head, which has so many bytes.
    fn open(path: &'a Path) -> Result<(Self, Head, u64), Error> {
        let io = |source| StreamError::Io { file: path.to_owned(), doing: "reading", source };
        // Asked before opening, because opening a pipe waits for its other end.
        if !fs::metadata(path).map_err(io)?.is_file() {
            return Err(StreamError::NotAFile { file: path.to_owned() }.into());
        }
        let file = File::open(path).map_err(io)?;
        let bytes = file.metadata().map_err(io)?.len();
        let mut input = Self { path, bytes, file: BufReader::new(file), sum: Checksum::default() };
        let mut start = [0; 16];
        input.read(&mut start)?;
        let [version, head_bytes] =
            [8, 12].map(|at| u32::from_le_bytes([0, 1, 2, 3].map(|i| start[at + i])));
        if start[..8] != *MAGIC {
            return Err(input.wrong("its first bytes", "RILLSESS", "others: it is no session"));
        }
        if version != VERSION {
            return Err(input.wrong("its version", VERSION, version));
        }
        if head_bytes > MAX_HEAD_BYTES {
            let expected = format!("at most {MAX_HEAD_BYTES} bytes");
            return Err(input.wrong("its head", expected, head_bytes));
        }
        let mut head = vec![0; head_bytes as usize];
        input.read(&mut head)?;
        match serde_json::from_slice(&head) {
            Ok(head) => Ok((input, head, head_bytes.into())),
            Err(error) => Err(input.wrong("its head", "model, tokens and note", error)),
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        match self.file.read_exact(bytes) {
            Ok(()) => {
                self.sum.update(bytes);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(self.wrong("it", "a whole session", "cut off"))
            }
            Err(source) => {
                Err(StreamError::Io { file: self.path.to_owned(), doing: "reading", source }.into())
            }
        }
    }

    fn read_words<T, const N: usize>(
        &mut self,
        values: &mut [T],
        value: impl Fn([u8; N]) -> T,
    ) -> Result<(), Error> {
        let mut bytes = vec![0; N * BLOCK.min(values.len())];
        for values in values.chunks_mut(BLOCK) {
            let bytes = &mut bytes[..N * values.len()];
            self.read(bytes)?;
            for (to, word) in values.iter_mut().zip(bytes.as_chunks().0) {
                *to = value(*word);
            }
        }
        Ok(())
    }

    fn wrong(&self, what: &'static str, expected: impl ToString, found: impl ToString) -> Error {
        Error::SessionFile {
            file: self.path.to_owned(),
            what,
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}
