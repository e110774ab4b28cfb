//! Compressed lists out of compressed objects.
//!
//! A deflate stream may be cut at byte boundaries (a full flush), and CRCs of parts combine to the CRC of the whole. So an object is
//! compressed once, is kept like that beside its other forms, and a compressed list costs no more than a plain one. It is a little
//! larger than a list that is compressed as a whole, since an object cannot refer back to the one before.

use std::cell::RefCell;
use std::sync::Arc;

use bytes::Bytes;
use flate2::{Compress, Compression, Crc, FlushCompress, Status};

use crate::cache::stored::{Form, Stored};

/// A stretch of a deflate stream that ends at a byte boundary.
pub struct Packed {
    deflate: Bytes,
    crc: Crc,
}

thread_local! {
    static DEFLATE: RefCell<Compress> = RefCell::new(Compress::new(Compression::fast(), false));
}

/// A gzip member's head: no name, no time, unknown system.
const HEAD: &[u8] = &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 4, 255];
/// The last block of a deflate stream: fixed codes, empty.
const LAST: &[u8] = &[0x03, 0x00];

/// Compresses parts as one stretch.
pub fn pack(parts: &[&[u8]]) -> Packed {
    let mut crc = Crc::new();
    let total: usize = parts.iter().map(|p| p.len()).sum();
    let mut out = Vec::with_capacity(total / 3 + 64);
    DEFLATE.with_borrow_mut(|deflate| {
        deflate.reset();
        for part in parts {
            crc.update(part);
            feed(deflate, part, &mut out, FlushCompress::None);
        }
        feed(deflate, &[], &mut out, FlushCompress::Full);
    });
    out.shrink_to_fit();
    Packed { deflate: out.into(), crc }
}

/// Gives all of `input` to the compressor, making room as it asks for it.
fn feed(deflate: &mut Compress, mut input: &[u8], out: &mut Vec<u8>, flush: FlushCompress) {
    loop {
        if out.capacity() - out.len() < 64 {
            out.reserve(out.capacity().max(256));
        }
        let before = deflate.total_in();
        let status = deflate.compress_vec(input, out, flush);
        let taken = usize::try_from(deflate.total_in() - before).unwrap_or(input.len());
        input = &input[taken.min(input.len())..];
        let full = out.len() == out.capacity();
        // Errors are for bad parameters only; a flush is whole when room is left.
        if matches!(status, Err(_) | Ok(Status::StreamEnd)) || (input.is_empty() && !full) {
            return;
        }
    }
}

/// An object with what separates it from the one before, compressed once per form.
pub fn object(stored: &Stored, form: &Form, separator: &[u8], bytes: &[u8]) -> Arc<Packed> {
    if let Some(packed) = stored.packed(form) {
        return packed;
    }
    let packed = Arc::new(pack(&[separator, bytes]));
    stored.keep_packed(form.clone(), packed.clone());
    packed
}

/// Stretches as a gzip file, in pieces.
pub fn gzip(stretches: &[Arc<Packed>]) -> Vec<Bytes> {
    let mut crc = Crc::new();
    let mut length: u32 = 0;
    let mut pieces = Vec::with_capacity(stretches.len() + 2);
    pieces.push(Bytes::from_static(HEAD));
    for stretch in stretches {
        crc.combine(&stretch.crc);
        length = length.wrapping_add(stretch.crc.amount());
        pieces.push(stretch.deflate.clone());
    }
    let mut tail = LAST.to_vec();
    tail.extend_from_slice(&crc.sum().to_le_bytes());
    tail.extend_from_slice(&length.to_le_bytes());
    pieces.push(tail.into());
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn check(parts: &[&[&[u8]]]) {
        let stretches: Vec<Arc<Packed>> = parts.iter().map(|p| Arc::new(pack(p))).collect();
        let file = gzip(&stretches).concat();
        let mut plain = Vec::new();
        flate2::read::GzDecoder::new(&file[..]).read_to_end(&mut plain).expect("gzip");
        let want: Vec<u8> = parts.iter().flat_map(|p| p.concat()).collect();
        assert_eq!(plain, want);
    }

    #[test]
    fn stretches_make_a_file() {
        check(&[]);
        check(&[&[b"one"]]);
        check(&[&[b"[", b"{\"a\":1}"], &[b",", b"{\"a\":2}"], &[], &[b"]"]]);
        let long: Vec<u8> = (0..300_000u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        check(&[&[&long], &[b",", &long[..77]], &[&[b'x'; 100_000]], &[b"end"]]);
    }
}
