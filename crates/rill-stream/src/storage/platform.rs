//! What each operating system calls a read past its page cache.

use std::fs::File;
use std::io;
use std::path::Path;

#[cfg(target_os = "linux")]
pub(super) fn open_direct(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;

    use rustix::fs::{AtFlags, OFlags, StatxFlags, statx};

    let flags = OFlags::DIRECT.bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    // Kernels before 6.1 and some file systems do not say; then the probe decides.
    if let Ok(about) = statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        && about.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        let align = about.stx_dio_offset_align.max(about.stx_dio_mem_align);
        if align == 0 || align as usize > super::READ_ALIGN {
            let message = format!("the file system asks for direct reads aligned to {align} bytes");
            return Err(io::Error::new(io::ErrorKind::Unsupported, message));
        }
    }
    Ok(file)
}

#[cfg(target_vendor = "apple")]
pub(super) fn open_direct(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    rustix::fs::fcntl_nocache(&file, true)?;
    Ok(file)
}

#[cfg(windows)]
pub(super) fn open_direct(path: &Path) -> io::Result<File> {
    use std::os::windows::fs::OpenOptionsExt;

    const FILE_FLAG_NO_BUFFERING: u32 = 0x2000_0000;
    File::options().read(true).custom_flags(FILE_FLAG_NO_BUFFERING).open(path)
}

#[cfg(not(any(target_os = "linux", target_vendor = "apple", windows)))]
pub(super) fn open_direct(_path: &Path) -> io::Result<File> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "not known how on this system"))
}

/// Reads once at a position.
#[cfg(unix)]
pub(super) fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    // Just below 2 GiB is the most that Linux reads at once, and macOS refuses more.
    let n = out.len().min(1 << 30);
    std::os::unix::fs::FileExt::read_at(file, &mut out[..n], offset)
}

/// Reads once at a position.
#[cfg(windows)]
pub(super) fn read_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    let n = out.len().min(1 << 30);
    std::os::windows::fs::FileExt::seek_read(file, &mut out[..n], offset)
}

/// Lets the page cache forget what has just been read through it: it is read again rarely, and
/// other programs need the memory.
#[cfg(target_os = "linux")]
pub(super) fn forget(file: &File, offset: u64, bytes: u64) {
    // Advice: nothing depends on it.
    let _ = rustix::fs::fadvise(
        file,
        offset,
        std::num::NonZeroU64::new(bytes),
        rustix::fs::Advice::DontNeed,
    );
}

#[cfg(not(target_os = "linux"))]
pub(super) fn forget(_file: &File, _offset: u64, _bytes: u64) {}
