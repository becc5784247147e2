//! `manifest.json`: what a container holds and where.

use std::collections::HashSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::record::RecordLayout;
use super::{ALIGN, PART_ALIGN, VERSION, checksum};

/// The manifest of a container; see `docs/format.md`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always `rill`.
    pub format: String,
    /// Always [`VERSION`].
    pub version: u32,
    /// Names the weights, wherever they are placed.
    pub fingerprint: String,
    /// Where files may lie; the first is the container's own folder.
    pub directories: Vec<String>,
    /// The release's small files.
    pub files: Vec<SmallFile>,
    /// Everything but routed experts.
    pub trunk: Trunk,
    /// Routed experts, if the model has any.
    pub experts: Option<Experts>,
    /// Checksum of the manifest itself.
    pub checksum: String,
}

/// A file of the release, unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmallFile {
    /// File name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Its checksum.
    pub checksum: String,
}

/// The file of trunk runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trunk {
    /// Index into the directories.
    pub directory: usize,
    /// File name.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// What it consists of.
    pub runs: Vec<Run>,
}

/// Tensors that are read together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// `global`, `layer N` or `vision`.
    pub name: String,
    /// First byte in the file.
    pub offset: u64,
    /// Size in the file, padding included.
    pub bytes: u64,
    /// Checksum of all of it.
    pub checksum: String,
    /// Its tensors by ascending offset.
    pub tensors: Vec<TrunkTensor>,
}

/// A tensor of the trunk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrunkTensor {
    /// Its published name.
    pub name: String,
    /// Its published shape.
    pub shape: Vec<u64>,
    /// How it is stored.
    pub codec: Codec,
    /// First byte of the codes, from the start of the run.
    pub offset: u64,
    /// Bytes of codes.
    pub code_bytes: u64,
    /// Bytes of scales, which follow the codes at the next multiple of 64.
    pub scale_bytes: u64,
}

impl TrunkTensor {
    /// First byte of the scales, from the start of the run.
    pub fn scale_offset(&self) -> u64 {
        (self.offset + self.code_bytes).next_multiple_of(PART_ALIGN as u64)
    }

    /// One past the last byte, or `None` beyond 64 bits.
    fn end(&self) -> Option<u64> {
        let codes = self.offset.checked_add(self.code_bytes)?;
        match self.scale_bytes {
            0 => Some(codes),
            n => codes.checked_next_multiple_of(PART_ALIGN as u64)?.checked_add(n),
        }
    }
}

/// The banks of routed experts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// w1.
    pub gate: Matrix,
    /// w3.
    pub up: Matrix,
    /// w2.
    pub down: Matrix,
    /// Size of the largest record; of every record, where the formats' lengths do not differ.
    pub record_bytes: u64,
    /// One per mixture layer, by ascending layer.
    pub banks: Vec<Bank>,
}

/// A matrix of every expert.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matrix {
    /// Outputs.
    pub rows: u64,
    /// Inputs.
    pub cols: u64,
    /// How it is stored.
    pub codec: Codec,
    /// Bytes of codes; of a format whose lengths differ, the most that one has.
    pub code_bytes: u64,
    /// Bytes of scales.
    pub scale_bytes: u64,
}

/// The experts of one layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bank {
    /// Index of the layer.
    pub layer: u32,
    /// Records in it.
    pub experts: u32,
    /// Of every expert, where its record begins and how large it is, in units of [`ALIGN`]; nothing
    /// where all records have the same size.
    #[serde(deserialize_with = "Option::deserialize")]
    pub records: Option<Vec<[u64; 2]>>,
    /// The files it lies in.
    pub stripes: Vec<Stripe>,
}

impl Bank {
    /// How many bytes of a record lie in each stripe.
    pub fn divide(&self, record_bytes: u64) -> impl Iterator<Item = u64> {
        const UNIT: u128 = ALIGN as u128;
        // Nothing overflows here, not even before a manifest has been checked.
        let all: u128 = self.stripes.iter().map(|stripe| u128::from(stripe.bytes) / UNIT).sum();
        let n = u128::from(record_bytes) / UNIT;
        let (mut before, mut taken) = (0, 0);
        self.stripes.iter().map(move |stripe| {
            before += u128::from(stripe.bytes) / UNIT;
            // Rounded up, so that the header is in the first stripe.
            let end = (before * n).div_ceil(all.max(1));
            let part = (end - taken) * UNIT;
            taken = end;
            u64::try_from(part).unwrap_or(u64::MAX)
        })
    }

    /// Sizes of the stripes' files.
    pub fn file_bytes(&self) -> Vec<u64> {
        let Some(records) = &self.records else {
            let bytes = |stripe: &Stripe| stripe.bytes.saturating_mul(u64::from(self.experts));
            return self.stripes.iter().map(bytes).collect();
        };
        let mut sums = vec![0u64; self.stripes.len()];
        for [_, units] in records {
            for (sum, part) in sums.iter_mut().zip(self.divide(units.saturating_mul(ALIGN as u64)))
            {
                *sum = sum.saturating_add(part);
            }
        }
        sums
    }
}

/// A part of every record of a bank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stripe {
    /// Index into the directories.
    pub directory: usize,
    /// File name.
    pub file: String,
    /// Bytes of each record that lie here; where records differ in size, they are divided in proportion.
    pub bytes: u64,
}

/// A number format on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Codec {
    /// Which format.
    pub name: CodecName,
    /// Inputs that share a scale; 0 for formats without groups of their own.
    pub group: u32,
    /// Bits per 8 inputs of a trellis format; 0 for all others.
    pub rate: u32,
    /// Bits of a window that count, of a trellis format; 0 for all others.
    pub width: u32,
}

impl Codec {
    /// A format without parameters.
    pub const fn plain(name: CodecName) -> Self {
        Self { name, group: 0, rate: 0, width: 0 }
    }

    /// A format with `group` inputs to a scale.
    pub const fn grouped(name: CodecName, group: u32) -> Self {
        Self { group, ..Self::plain(name) }
    }

    /// A trellis format.
    pub const fn trellis(rate: u32, width: u32) -> Self {
        Self { rate, width, ..Self::plain(CodecName::Trellis) }
    }

    /// A trellis format in a rotated basis.
    pub const fn rotated(rate: u32, width: u32) -> Self {
        Self { rate, width, ..Self::plain(CodecName::Rotated) }
    }
}

/// Names of number formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodecName {
    /// Little-endian f32.
    F32,
    /// Little-endian bf16.
    Bf16,
    /// Signed bytes with f16 scales.
    Q8,
    /// Nibbles with f16 scales.
    Q4,
    /// Four-bit floats with power-of-two scales.
    Mxfp4,
    /// Windows into a stream of bits.
    Trellis,
    /// Four-bit floats with power-of-two scales, entropy-coded.
    Mxfp4z,
    /// The same in a rotated basis, without side information.
    #[serde(rename = "trellis-rotated")]
    Rotated,
}

impl CodecName {
    /// Number in a record's header.
    pub(super) fn id(self) -> u8 {
        self as u8
    }

    /// The name as the manifest writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            CodecName::F32 => "f32",
            CodecName::Bf16 => "bf16",
            CodecName::Q8 => "q8",
            CodecName::Q4 => "q4",
            CodecName::Mxfp4 => "mxfp4",
            CodecName::Trellis => "trellis",
            CodecName::Rotated => "trellis-rotated",
            CodecName::Mxfp4z => "mxfp4z",
        }
    }

    /// Whether matrices of one shape differ in length.
    pub fn varies(self) -> bool {
        self == CodecName::Mxfp4z
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.as_str();
        match (self.group, self.rate) {
            (0, 0) => f.write_str(name),
            (0, rate) => write!(f, "{name} of {} bits", f64::from(rate) / 8.0),
            (group, _) => write!(f, "{name} in groups of {group}"),
        }
    }
}

/// Why a manifest is not taken.
pub(super) enum Refused {
    /// It is of another version.
    Version(u64),
    /// Something in it is wrong.
    Wrong(Wrong),
}

impl From<Wrong> for Refused {
    fn from(wrong: Wrong) -> Self {
        Self::Wrong(wrong)
    }
}

/// What is wrong with a manifest: which field, and what it should be and is.
pub(super) struct Wrong {
    pub(super) field: String,
    pub(super) expected: String,
    pub(super) found: String,
}

fn wrong(field: impl Into<String>, expected: impl ToString, found: impl ToString) -> Wrong {
    Wrong { field: field.into(), expected: expected.to_string(), found: found.to_string() }
}

/// Lines around the checksum's digits at the end of the file.
const BEFORE_DIGITS: &str = "  \"checksum\": \"";
const AFTER_DIGITS: &str = "\"\n}\n";
const DIGITS: usize = 16;
const NO_DIGITS: &str = "0000000000000000";

/// Most layers, experts of a layer, directories and stripes that make sense.
const MAX_BANKS: usize = 1 << 10;
const MAX_EXPERTS: u32 = 1 << 16;
const MAX_DIRECTORIES: usize = 256;

impl Manifest {
    /// The file's bytes, its checksum included.
    pub fn to_bytes(&self) -> Vec<u8> {
        let blank = Self { checksum: NO_DIGITS.to_owned(), ..self.clone() };
        let mut text = serde_json::to_string_pretty(&blank).expect("plain data serialises");
        text.push('\n');
        let digits = text.len() - AFTER_DIGITS.len() - DIGITS;
        debug_assert!(text[..digits].ends_with(BEFORE_DIGITS));
        let sum = checksum(text.as_bytes());
        text.replace_range(digits..digits + DIGITS, &format!("{sum:016x}"));
        text.into_bytes()
    }

    /// Parses and checks a manifest; everything it says is then consistent with itself.
    ///
    /// The version comes before the checksum and all other fields: another one may have others.
    pub(super) fn parse(bytes: &[u8]) -> Result<(Self, Option<RecordLayout>), Refused> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u64,
        }
        if let Ok(Head { format, version }) = serde_json::from_slice(bytes)
            && format == "rill"
            && version != u64::from(VERSION)
        {
            return Err(Refused::Version(version));
        }
        let digits = bytes.len().checked_sub(AFTER_DIGITS.len() + DIGITS);
        let Some(digits) = digits.filter(|&at| {
            bytes[..at].ends_with(BEFORE_DIGITS.as_bytes())
                && bytes[at + DIGITS..] == *AFTER_DIGITS.as_bytes()
        }) else {
            let expected = "the line with its checksum, then }";
            return Err(wrong("its end", expected, "something else").into());
        };
        let mut blank = bytes.to_vec();
        blank[digits..digits + DIGITS].copy_from_slice(NO_DIGITS.as_bytes());
        let expected = format!("{:016x}", checksum(&blank));
        let found = String::from_utf8_lossy(&bytes[digits..digits + DIGITS]);
        if found != expected {
            return Err(wrong("its own checksum", expected, found).into());
        }
        let manifest: Self = match serde_json::from_slice(bytes) {
            Ok(manifest) => manifest,
            Err(error) => {
                let expected = format!("the fields of a version {VERSION} container");
                return Err(wrong("its JSON", expected, error).into());
            }
        };
        let layout = manifest.check()?;
        Ok((manifest, layout))
    }

    fn check(&self) -> Result<Option<RecordLayout>, Wrong> {
        if self.format != "rill" {
            return Err(wrong("format", "rill", &self.format));
        }
        check_hex("fingerprint", &self.fingerprint, 32)?;
        if self.directories.first().is_none_or(|first| first != ".") {
            let first = self.directories.first().cloned().unwrap_or_default();
            return Err(wrong("directories[0]", ".", first));
        }
        if self.directories.len() > MAX_DIRECTORIES {
            return Err(wrong(
                "directories",
                format!("at most {MAX_DIRECTORIES}"),
                self.directories.len(),
            ));
        }
        // One place for one file, and none for the manifest itself.
        let mut places = HashSet::from([(0, "manifest.json")]);
        for (i, file) in self.files.iter().enumerate() {
            self.check_place(&format!("files[{i}]"), 0, &file.name, &mut places)?;
            check_hex(&format!("files[{i}].checksum"), &file.checksum, DIGITS)?;
        }
        self.check_place("trunk", self.trunk.directory, &self.trunk.file, &mut places)?;
        self.check_trunk()?;
        match &self.experts {
            None => Ok(None),
            Some(experts) => self.check_experts(experts, &mut places).map(Some),
        }
    }

    fn check_place<'a>(
        &'a self,
        field: &str,
        directory: usize,
        file: &'a str,
        places: &mut HashSet<(usize, &'a str)>,
    ) -> Result<(), Wrong> {
        let directories = self.directories.len();
        if directory >= directories {
            return Err(wrong(
                format!("{field}.directory"),
                format!("below {directories}"),
                directory,
            ));
        }
        let plain = !file.is_empty()
            && file != "."
            && file != ".."
            && !file.contains(['/', '\\', '\0', ':']);
        if !plain {
            return Err(wrong(format!("{field}.file"), "a plain file name", format!("{file:?}")));
        }
        if !places.insert((directory, file)) {
            return Err(wrong(
                format!("{field}.file"),
                "a file of its own",
                format!("{file:?} again"),
            ));
        }
        Ok(())
    }

    fn check_trunk(&self) -> Result<(), Wrong> {
        let mut at = 0u64;
        let mut names = HashSet::new();
        for (i, run) in self.trunk.runs.iter().enumerate() {
            let field = |name: &str| format!("trunk.runs[{i}].{name}");
            if run.offset != at {
                return Err(wrong(field("offset"), at, run.offset));
            }
            check_hex(&field("checksum"), &run.checksum, DIGITS)?;
            let mut end = 0;
            for tensor in &run.tensors {
                let name = format!("{} of tensor {:?}", field("offset"), tensor.name);
                if tensor.offset < end || !tensor.offset.is_multiple_of(PART_ALIGN as u64) {
                    return Err(wrong(
                        &name,
                        format!("a multiple of 64 from {end}"),
                        tensor.offset,
                    ));
                }
                end = match tensor.end() {
                    Some(end) if end <= run.bytes => end,
                    end => {
                        let found = end.map_or("overflow".to_owned(), |end| end.to_string());
                        return Err(wrong(name, format!("an end up to {}", run.bytes), found));
                    }
                };
                let of_tensor = format!("the codec of tensor {:?}", tensor.name);
                check_codec(&of_tensor, tensor.codec)?;
                if tensor.codec.name.varies() {
                    return Err(wrong(of_tensor, "one of a known length", tensor.codec));
                }
                if !names.insert(tensor.name.as_str()) {
                    return Err(wrong(
                        field("tensors"),
                        "each tensor once",
                        format!("{:?} twice", tensor.name),
                    ));
                }
            }
            let expected = end.checked_next_multiple_of(ALIGN as u64);
            if Some(run.bytes) != expected {
                let expected = expected.map_or("fewer".to_owned(), |bytes| bytes.to_string());
                return Err(wrong(field("bytes"), expected, run.bytes));
            }
            at = match at.checked_add(run.bytes) {
                Some(at) => at,
                None => return Err(wrong(field("bytes"), "an end below 2^64", run.bytes)),
            };
        }
        if self.trunk.bytes != at {
            return Err(wrong("trunk.bytes", at, self.trunk.bytes));
        }
        Ok(())
    }

    fn check_experts<'a>(
        &'a self,
        experts: &'a Experts,
        places: &mut HashSet<(usize, &'a str)>,
    ) -> Result<RecordLayout, Wrong> {
        let Experts { gate, up, down, .. } = experts;
        let matrices = [gate.clone(), up.clone(), down.clone()];
        for (name, matrix) in ["gate", "up", "down"].iter().zip(&matrices) {
            check_codec(&format!("experts.{name}.codec"), matrix.codec)?;
        }
        let Some(layout) = RecordLayout::new(matrices) else {
            return Err(wrong("experts", "records that can be addressed", "larger ones"));
        };
        let layout = match layout.varies() {
            false if experts.record_bytes != layout.record_bytes as u64 => {
                return Err(wrong(
                    "experts.record_bytes",
                    layout.record_bytes,
                    experts.record_bytes,
                ));
            }
            false => layout,
            true => {
                let records = experts.banks.iter().flat_map(|bank| bank.records.iter().flatten());
                let largest = records.map(|[_, units]| *units).max().unwrap_or(0);
                let largest = largest.saturating_mul(ALIGN as u64);
                if experts.record_bytes != largest {
                    return Err(wrong("experts.record_bytes", largest, experts.record_bytes));
                }
                let at_most = layout.record_bytes;
                layout.with_largest(largest).ok_or_else(|| {
                    wrong("experts.record_bytes", format!("16384 to {at_most}"), largest)
                })?
            }
        };
        if experts.banks.len() > MAX_BANKS {
            return Err(wrong(
                "experts.banks",
                format!("at most {MAX_BANKS}"),
                experts.banks.len(),
            ));
        }
        let mut next_layer = 0;
        for (i, bank) in experts.banks.iter().enumerate() {
            let field = format!("experts.banks[{i}]");
            if bank.layer < next_layer || bank.layer >= u32::MAX / 2 {
                return Err(wrong(
                    format!("{field}.layer"),
                    format!("{next_layer} or more"),
                    bank.layer,
                ));
            }
            next_layer = bank.layer + 1;
            if bank.experts == 0 || bank.experts > MAX_EXPERTS {
                return Err(wrong(
                    format!("{field}.experts"),
                    format!("1 to {MAX_EXPERTS}"),
                    bank.experts,
                ));
            }
            let mut sum = 0u64;
            for stripe in &bank.stripes {
                self.check_place(&field, stripe.directory, &stripe.file, places)?;
                if stripe.bytes == 0 || !stripe.bytes.is_multiple_of(ALIGN as u64) {
                    return Err(wrong(
                        format!("{field}.stripes"),
                        "multiples of 16384",
                        stripe.bytes,
                    ));
                }
                sum = sum.saturating_add(stripe.bytes);
            }
            if !layout.varies() && sum != experts.record_bytes {
                return Err(wrong(format!("{field}.stripes"), experts.record_bytes, sum));
            }
            if layout.varies() && !(experts.record_bytes..1 << 62).contains(&sum) {
                let expected = format!("{} or more", experts.record_bytes);
                return Err(wrong(format!("{field}.stripes"), expected, sum));
            }
            check_records(&format!("{field}.records"), bank, &layout)?;
        }
        Ok(layout)
    }
}

/// Bits per 8 inputs, and bits of a window that count, of a trellis format.
const RATES: std::ops::RangeInclusive<u32> = 16..=28;
const ROTATED_RATES: std::ops::RangeInclusive<u32> = 16..=32;
const WIDTHS: std::ops::RangeInclusive<u32> = 10..=14;

/// Whether a format has the parameters that are its own, and no others. Which groups there are, kernels
/// know.
fn check_codec(field: &str, codec: Codec) -> Result<(), Wrong> {
    let Codec { name, group, rate, width } = codec;
    let grouped = matches!(name, CodecName::Q8 | CodecName::Q4);
    let expected = match name {
        CodecName::Trellis => (0..=0, RATES, WIDTHS),
        CodecName::Rotated => (0..=0, ROTATED_RATES, WIDTHS),
        // What a record's header has room for.
        _ if grouped => (0..=u32::from(u16::MAX), 0..=0, 0..=0),
        _ => (0..=0, 0..=0, 0..=0),
    };
    let (groups, rates, widths) = expected;
    for (parameter, range, found) in
        [("group", groups, group), ("rate", rates, rate), ("width", widths, width)]
    {
        if !range.contains(&found) {
            let (name, first, last) = (name.as_str(), range.start(), range.end());
            let expected = match first == last {
                true => format!("{first} for {name}"),
                false => format!("{first} to {last} for {name}"),
            };
            return Err(wrong(format!("{field}.{parameter}"), expected, found));
        }
    }
    Ok(())
}

/// Records of different sizes must follow one another without gap or overlap; others are not listed.
fn check_records(field: &str, bank: &Bank, layout: &RecordLayout) -> Result<(), Wrong> {
    let Some(records) = &bank.records else {
        return match layout.varies() {
            true => Err(wrong(field, "a place for every expert", "null")),
            false => Ok(()),
        };
    };
    if !layout.varies() {
        return Err(wrong(field, "null, as all records have the same size", "a list"));
    }
    if records.len() as u64 != u64::from(bank.experts) {
        return Err(wrong(field, format!("{} of them", bank.experts), records.len()));
    }
    let largest = (layout.record_bytes / ALIGN) as u64;
    let mut sorted = records.clone();
    sorted.sort_unstable();
    let mut end = 0u64;
    for [first, units] in sorted {
        if first != end {
            return Err(wrong(field, format!("a record at {end}"), format!("one at {first}")));
        }
        if units == 0 || units > largest {
            return Err(wrong(field, format!("records of 1 to {largest} units"), units));
        }
        // So that no position in a file passes 2^62.
        end += units;
        if end > (1 << 62) / ALIGN as u64 {
            return Err(wrong(field, "an end below 2^62 bytes", format!("{end} units")));
        }
    }
    Ok(())
}

fn check_hex(field: &str, text: &str, digits: usize) -> Result<(), Wrong> {
    let hex = |c: u8| c.is_ascii_digit() || (b'a'..=b'f').contains(&c);
    if text.len() != digits || !text.bytes().all(hex) {
        return Err(wrong(field, format!("{digits} hexadecimal digits"), format!("{text:?}")));
    }
    Ok(())
}
