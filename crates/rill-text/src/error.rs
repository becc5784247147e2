//! Every way a tokenizer file or a token id can be wrong.

/// What went wrong with a tokenizer file, a token id or a prompt. Lines are counted from 1.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The model file holds no token at all.
    #[error("tiktoken.model: no tokens in it; fetch the file again")]
    EmptyModel,
    /// A line is longer than any token needs.
    #[error(
        "tiktoken.model line {line}: {bytes} bytes long, at most {limit} are read; fetch the file again"
    )]
    LineTooLong {
        /// Line number.
        line: usize,
        /// Length of the line.
        bytes: usize,
        /// Longest line accepted.
        limit: usize,
    },
    /// A line is not two fields.
    #[error(
        "tiktoken.model line {line}: expected `base64 rank`, found \"{found}\"; fetch the file again"
    )]
    MalformedLine {
        /// Line number.
        line: usize,
        /// Start of the line, escaped.
        found: String,
    },
    /// The first field of a line is not base64.
    #[error("tiktoken.model line {line}: expected base64, found \"{found}\"; fetch the file again")]
    BadBase64 {
        /// Line number.
        line: usize,
        /// Start of the field, escaped.
        found: String,
    },
    /// The second field of a line is not a rank.
    #[error(
        "tiktoken.model line {line}: expected a rank (a 32-bit decimal), found \"{found}\"; fetch the file again"
    )]
    BadRank {
        /// Line number.
        line: usize,
        /// Start of the field, escaped.
        found: String,
    },
    /// Two lines carry the same rank.
    #[error(
        "tiktoken.model line {line}: rank {rank} was already given on line {first_line}; fetch the file again"
    )]
    DuplicateRank {
        /// Line number.
        line: usize,
        /// Line that gave the rank first.
        first_line: usize,
        /// The rank.
        rank: u32,
    },
    /// Two lines carry the same bytes.
    #[error(
        "tiktoken.model line {line}: the bytes of rank {rank} were already given on line {first_line}; \
         fetch the file again"
    )]
    DuplicateToken {
        /// Line number.
        line: usize,
        /// Line that gave the bytes first.
        first_line: usize,
        /// Rank on the later line.
        rank: u32,
    },
    /// The ranks are not exactly 0, 1, 2, … up to the number of tokens.
    #[error(
        "tiktoken.model line {line}: rank {rank}, but with {n_ranks} tokens ranks must fill 0 to {} without a gap; \
         fetch the file again", n_ranks - 1
    )]
    RankGap {
        /// Line number.
        line: usize,
        /// Rank on that line.
        rank: u32,
        /// Tokens in the file.
        n_ranks: usize,
    },
    /// A rank does not fit the model's vocabulary.
    #[error(
        "tiktoken.model line {line}: rank {rank}, but config.json says vocab_size is {vocab_size}; \
         the two files belong to different models"
    )]
    RankBeyondVocab {
        /// Line number.
        line: usize,
        /// Rank on that line.
        rank: u32,
        /// Vocabulary size asked for.
        vocab_size: u32,
    },
    /// One of the 256 single bytes has no token, so some text could not be encoded.
    #[error("tiktoken.model: no token for the single byte 0x{byte:02x}; fetch the file again")]
    MissingByte {
        /// The byte.
        byte: u8,
    },
    /// `tokenizer_config.json` is not the JSON expected.
    #[error(
        "tokenizer_config.json: {source}; expected `added_tokens_decoder` to map ids to {{\"content\": name}}"
    )]
    ConfigJson {
        /// Problem, with its line and column.
        #[from]
        source: serde_json::Error,
    },
    /// A key of `added_tokens_decoder` is not an id.
    #[error(
        "tokenizer_config.json: added_tokens_decoder: expected an id (a 32-bit decimal), found \"{found}\""
    )]
    BadReservedId {
        /// Start of the key, escaped.
        found: String,
    },
    /// A reserved id is also an ordinary token.
    #[error(
        "tokenizer_config.json: id {id} (\"{name}\") is an ordinary token: tiktoken.model has ranks 0 to {}; \
         the two files belong to different models", n_ranks - 1
    )]
    ReservedIdIsRank {
        /// The id.
        id: u32,
        /// Its name.
        name: String,
        /// Number of ordinary tokens.
        n_ranks: u32,
    },
    /// A reserved id does not fit the model's vocabulary.
    #[error(
        "tokenizer_config.json: id {id} (\"{name}\"), but config.json says vocab_size is {vocab_size}; \
         the two files belong to different models"
    )]
    ReservedIdBeyondVocab {
        /// The id.
        id: u32,
        /// Its name.
        name: String,
        /// Vocabulary size asked for.
        vocab_size: u32,
    },
    /// One id is named twice.
    #[error("tokenizer_config.json: id {id} is named twice; keep one of the entries")]
    DuplicateReservedId {
        /// The id.
        id: u32,
    },
    /// One name stands for two ids.
    #[error(
        "tokenizer_config.json: ids {first_id} and {id} are both named \"{name}\"; rename one of them"
    )]
    DuplicateReservedName {
        /// Smaller id.
        first_id: u32,
        /// Larger id.
        id: u32,
        /// Their name.
        name: String,
    },
    /// A reserved name is empty or too long.
    #[error(
        "tokenizer_config.json: the name of id {id} is {bytes} bytes long; expected 1 to {limit}"
    )]
    ReservedNameLength {
        /// The id.
        id: u32,
        /// Length of its name.
        bytes: usize,
        /// Longest name accepted.
        limit: usize,
    },
    /// The vocabulary leaves implausibly many ids unnamed.
    #[error(
        "config.json: vocab_size {vocab_size} leaves {n_reserved} ids beyond the {n_ranks} in tiktoken.model, \
         at most {limit} are accepted; the two files belong to different models"
    )]
    TooManyReserved {
        /// Vocabulary size asked for.
        vocab_size: u32,
        /// Ids beyond the ranks.
        n_reserved: u32,
        /// Number of ordinary tokens.
        n_ranks: u32,
        /// Most reserved ids accepted.
        limit: u32,
    },
    /// A token id outside the vocabulary was to be decoded.
    #[error(
        "token id {id} at position {position} is outside the vocabulary of {vocab_size}; it is from another model"
    )]
    UnknownId {
        /// The id.
        id: u32,
        /// Its index in the sequence.
        position: usize,
        /// Size of the vocabulary.
        vocab_size: u32,
    },
    /// A chat format needs a reserved token that this tokenizer lacks.
    #[error(
        "tokenizer_config.json: no reserved token \"{name}\", which this chat format needs; \
         choose the format with ChatFormat::detect"
    )]
    MissingReserved {
        /// Name of the token.
        name: &'static str,
    },
}
