//! Whether a kernel's machine code is all there. The driver is given an address without a length
//! and reads as far as the image's own tables say, so those have to lie within its bytes.

/// The parts of an ELF header of 64 bits that say where the tables are.
const HEADER_BYTES: usize = 64;
/// The smallest entry of a section table.
const SECTION_BYTES: usize = 64;
const MAGIC: [u8; 4] = *b"\x7fELF";
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
/// Section types whose contents are in the file by ELF's own definition: code and data, symbols,
/// strings. Others may only name a size (`NOBITS`, CUDA's shared memory).
const PROGBITS: u64 = 1;
const SYMTAB: u64 = 2;
const STRTAB: u64 = 3;

/// What is missing of an image; nothing where it is whole.
pub(super) fn check(image: &[u8]) -> Result<(), String> {
    let cut = || format!("its {} bytes end within the header", image.len());
    let header = image.get(..HEADER_BYTES).ok_or_else(cut)?;
    if header[..4] != MAGIC || header[4] != CLASS_64 || header[5] != LITTLE_ENDIAN {
        return Err("it is no ELF file of 64 bits".to_owned());
    }
    let entry = |field| number(header, field, 2);
    let segments = table(image, number(header, 32, 8), entry(54), entry(56));
    segments.ok_or("its segment table lies beyond its end")?;
    let sections = table(image, number(header, 40, 8), entry(58), entry(60));
    let sections = sections.ok_or("its section table lies beyond its end")?;
    let size = entry(58) as usize;
    if sections.is_empty() || size < SECTION_BYTES {
        return Err("it has no sections".to_owned());
    }
    for section in sections.chunks_exact(size) {
        let kind = number(section, 4, 4);
        let (start, bytes) = (number(section, 24, 8), number(section, 32, 8));
        if matches!(kind, PROGBITS | SYMTAB | STRTAB) && part(image, start, bytes).is_none() {
            return Err("a section lies beyond its end".to_owned());
        }
    }
    Ok(())
}

/// A little-endian number of up to eight bytes; zero where the bytes are not there.
fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    let bytes = bytes.get(at..at + len).unwrap_or_default();
    bytes
        .iter()
        .rev()
        .fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

fn table(image: &[u8], start: u64, entry_bytes: u64, entries: u64) -> Option<&[u8]> {
    if entries == 0 {
        return Some(&[]);
    }
    part(image, start, entry_bytes.checked_mul(entries)?)
}

fn part(image: &[u8], start: u64, bytes: u64) -> Option<&[u8]> {
    let start = usize::try_from(start).ok()?;
    let bytes = usize::try_from(bytes).ok()?;
    image.get(start..start.checked_add(bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header, eight bytes of code, and a table of two sections: the code and one that only
    /// names a size.
    fn image() -> Vec<u8> {
        let mut image = vec![0; HEADER_BYTES];
        image[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', CLASS_64, LITTLE_ENDIAN]);
        image.extend([0x90; 8]);
        let sections = image.len() as u64;
        image[40..48].copy_from_slice(&sections.to_le_bytes());
        image[58..60].copy_from_slice(&64_u16.to_le_bytes());
        image[60..62].copy_from_slice(&2_u16.to_le_bytes());
        for (kind, start, bytes) in [(1_u32, 64_u64, 8_u64), (8, 64, 1 << 20)] {
            let mut section = [0; 64];
            section[4..8].copy_from_slice(&kind.to_le_bytes());
            section[24..32].copy_from_slice(&start.to_le_bytes());
            section[32..40].copy_from_slice(&bytes.to_le_bytes());
            image.extend(section);
        }
        image
    }

    #[test]
    fn a_whole_image_is_taken_and_no_beginning_of_one() {
        let image = image();
        assert_eq!(check(&image), Ok(()));
        for bytes in 0..image.len() {
            assert!(check(&image[..bytes]).is_err(), "{bytes}");
        }
    }

    #[test]
    fn tables_and_sections_beyond_the_end_are_refused() {
        for (at, value, problem) in [
            (0, vec![0], "no ELF file"),
            (40, vec![0xff; 8], "section table"),
            (60, vec![0, 0], "no sections"),
            (60, vec![0xff, 0xff], "section table"),
            (58, vec![1, 0], "no sections"),
            // The first section's size.
            (72 + 32, vec![0xff; 8], "a section lies"),
        ] {
            let mut image = image();
            image[at..at + value.len()].copy_from_slice(&value);
            let found = check(&image).unwrap_err();
            assert!(found.contains(problem), "{found}");
        }
    }

    #[test]
    fn a_segment_table_beyond_the_end_is_refused() {
        let mut image = image();
        image[32..40].copy_from_slice(&(1_u64 << 40).to_le_bytes());
        image[54..56].copy_from_slice(&56_u16.to_le_bytes());
        image[56..58].copy_from_slice(&1_u16.to_le_bytes());
        assert!(check(&image).unwrap_err().contains("segment table"));
    }
}
