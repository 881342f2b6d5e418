//! CRC-32C, the checksum of TensorBoard's record framing. It uses Castagnoli's polynomial, which
//! is not that of zip and PNG. Events are tens of bytes, so one table of 256 entries is enough.

/// Castagnoli's polynomial 0x1EDC6F41 with its bits reversed: the lowest bit is shifted out first.
const POLYNOMIAL: u32 = 0x82F6_3B78;

const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut remainder = index as u32;
        let mut bit = 0;
        while bit < 8 {
            let carry = remainder & 1;
            remainder >>= 1;
            if carry == 1 {
                remainder ^= POLYNOMIAL;
            }
            bit += 1;
        }
        table[index] = remainder;
        index += 1;
    }
    table
}

/// The CRC-32C of `bytes`.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |remainder, &byte| {
        let index = (remainder ^ u32::from(byte)) & 0xff;
        (remainder >> 8) ^ TABLE[index as usize]
    })
}

/// The checksum as the framing stores it, rotated and shifted by a constant: the CRC of data that
/// contains its own CRC would otherwise be degenerate.
pub(super) fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xA282_EAD8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        assert_eq!(crc32c(b""), 0);
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        // The examples of RFC 3720, appendix B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xff; 32]), 0x62A8_AB43);
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&ascending), 0x46DD_794E);
    }

    #[test]
    fn masking_can_be_undone() {
        let masked = masked_crc32c(b"123456789");
        assert_ne!(masked, 0xE306_9283);
        let unmasked = masked.wrapping_sub(0xA282_EAD8).rotate_left(15);
        assert_eq!(unmasked, 0xE306_9283);
    }
}
