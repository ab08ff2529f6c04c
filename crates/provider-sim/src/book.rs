//! The book: an append-only file with one JSON line for whatever was applied.
//!
//! It promises that a line is on the disk before anybody is told of what it says, and that it holds nothing which was not
//! applied: lines that could not be made durable are cut off again, and so is a last line that a crash tore, which nobody
//! was told of. It holds no source token, only a digest of the order. One process at a time writes it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

/// A book is read whole when it is opened.
const LARGEST: u64 = 1 << 30;

/// What a line tells of.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Money was moved.
    Charge,
    /// A charge was declined; no money was moved.
    Decline,
    /// A key was fenced.
    Fence,
    /// Money was given back.
    Refund,
    /// A refund failed; no money was given back.
    RefundFailure,
}

/// A line.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Counts up from 1 without a gap.
    pub seq: u64,
    /// When, by the provider's clock.
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    /// What happened.
    pub kind: Kind,
    /// The key: a charge's, or a refund's own.
    pub key: String,
    /// The provider's identifier; empty for a fence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reference: String,
    /// Smallest units; `None` for a fence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub amount: Option<i64>,
    /// ISO 4217; empty for a fence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub currency: String,
    /// Of a refund: the key of its charge.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub charge_key: String,
    /// Why it was declined or failed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub code: String,
    /// Of a charge or decline: hexadecimal SHA-256 of the encoded order.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub order: String,
}

impl Entry {
    /// An entry of which only the number counts.
    pub(crate) fn blank(seq: u64) -> Self {
        Self {
            seq,
            at: OffsetDateTime::UNIX_EPOCH,
            kind: Kind::Fence,
            key: String::new(),
            reference: String::new(),
            amount: None,
            currency: String::new(),
            charge_key: String::new(),
            code: String::new(),
            order: String::new(),
        }
    }
}

/// A book that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BookError {
    /// The file cannot be opened, read or cut.
    #[error("the book {path} cannot be used")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process writes it.
    #[error("the book {path} is in use by another process")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// A line that is no entry. Only the last line can be torn, and it has no end.
    #[error("line {line} of the book {path} is no entry")]
    Line {
        /// The file.
        path: PathBuf,
        /// Counts from 1.
        line: usize,
        /// Why.
        source: serde_json::Error,
    },
    /// An entry that does not follow from those before it.
    #[error("entry {seq} of the book does not follow from those before it")]
    Order {
        /// Its number.
        seq: u64,
    },
}

/// Where lines are made durable.
pub trait Storage: Send {
    /// Appends whole lines durably: all of them, or after an error none.
    ///
    /// # Errors
    ///
    /// When they could not be written or made durable.
    fn append(&mut self, lines: &[u8]) -> io::Result<()>;
}

/// An open book.
#[derive(Debug)]
pub struct Book {
    file: File,
    /// Up to here everything is durable.
    length: u64,
    /// Something may stand behind `length` that was never promised.
    torn: bool,
}

impl Book {
    /// Opens the book, making it if it is not there, and reads its entries.
    ///
    /// # Errors
    ///
    /// When it is in use, cannot be read, or holds a line that is no entry.
    pub fn open(path: &Path) -> Result<(Self, Vec<Entry>), BookError> {
        let failed = |source| BookError::File { path: path.to_owned(), source };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(failed)?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => BookError::InUse { path: path.to_owned() },
            TryLockError::Error(source) => failed(source),
        })?;
        sync_folder(path).map_err(failed)?;
        if file.metadata().map_err(failed)?.len() > LARGEST {
            return Err(failed(io::Error::new(io::ErrorKind::FileTooLarge, "larger than 1 GiB")));
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed)?;
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let mut entries = Vec::new();
        for (index, line) in bytes[..whole].split_inclusive(|byte| *byte == b'\n').enumerate() {
            let entry = serde_json::from_slice(line).map_err(|source| BookError::Line {
                path: path.to_owned(),
                line: index + 1,
                source,
            })?;
            entries.push(entry);
        }
        let torn = whole < bytes.len();
        let mut book = Self { file, length: whole as u64, torn };
        if torn {
            tracing::warn!(
                book = %path.display(),
                bytes = bytes.len() - whole,
                "the last line of the book was torn and is cut off: nobody was told of it"
            );
            book.cut().map_err(failed)?;
        }
        Ok((book, entries))
    }

    /// Cuts off what was never promised.
    fn cut(&mut self) -> io::Result<()> {
        self.torn = true;
        self.file.set_len(self.length)?;
        self.file.sync_data()?;
        self.torn = false;
        Ok(())
    }

    fn write(&mut self, lines: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.length))?;
        self.file.write_all(lines)?;
        self.file.sync_data()
    }
}

impl Storage for Book {
    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        if self.torn {
            self.cut()?;
        }
        let written = self.write(lines);
        match &written {
            Ok(()) => self.length += lines.len() as u64,
            // If even that fails, it is tried again before the next line is written.
            Err(_) => drop(self.cut()),
        }
        written
    }
}

/// Makes the file's name durable.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn line(seq: u64) -> (Entry, Vec<u8>) {
        let entry = Entry { key: format!("k{seq}"), ..Entry::blank(seq) };
        let mut bytes = serde_json::to_vec(&entry).unwrap();
        bytes.push(b'\n');
        (entry, bytes)
    }

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("semel-book-{name}-{}.jsonl", std::process::id()));
        drop(fs::remove_file(&path));
        path
    }

    #[test]
    fn keeps_its_lines() {
        let path = scratch("keeps");
        let (one, two) = (line(1), line(2));
        let (mut book, entries) = Book::open(&path).unwrap();
        assert_eq!(entries, []);
        book.append(&one.1).unwrap();
        book.append(&two.1).unwrap();
        drop(book);
        assert_eq!(Book::open(&path).unwrap().1, [one.0, two.0]);
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn cuts_a_torn_last_line_off() {
        let path = scratch("torn");
        let (one, two) = (line(1), line(2));
        // Complete but for its end: it was not yet durable when the process died.
        let torn = &two.1[..two.1.len() - 1];
        fs::write(&path, [one.1.as_slice(), torn].concat()).unwrap();
        let (mut book, entries) = Book::open(&path).unwrap();
        assert_eq!(entries, [one.0]);
        assert_eq!(fs::read(&path).unwrap(), one.1);
        book.append(&two.1).unwrap();
        assert_eq!(fs::read(&path).unwrap(), [one.1, two.1].concat());
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn cuts_off_what_a_failed_write_left() {
        let path = scratch("failed");
        let (one, two) = (line(1), line(2));
        let (mut book, _) = Book::open(&path).unwrap();
        book.append(&one.1).unwrap();
        fs::write(&path, [one.1.as_slice(), b"half a li"].concat()).unwrap();
        book.torn = true;
        book.append(&two.1).unwrap();
        assert_eq!(fs::read(&path).unwrap(), [one.1, two.1].concat());
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn refuses_a_broken_line_and_a_second_writer() {
        let path = scratch("broken");
        fs::write(&path, "{}\n").unwrap();
        assert!(matches!(Book::open(&path), Err(BookError::Line { line: 1, .. })));
        fs::write(&path, "").unwrap();
        let open = Book::open(&path).unwrap();
        assert!(matches!(Book::open(&path), Err(BookError::InUse { .. })));
        drop(open);
        fs::remove_file(&path).unwrap();
    }
}
