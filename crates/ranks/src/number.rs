//! Numbers as they travel: little-endian, whatever the machine.

/// Something of a fixed number of bytes.
pub trait Element: Copy {
    const BYTES: usize;

    fn write(self, bytes: &mut [u8]);
    fn read(bytes: &[u8]) -> Self;
}

/// One that can be added.
pub trait Number: Element {
    fn plus(self, other: Self) -> Self;
}

macro_rules! element {
    ($($number:ty),*) => {$(
        impl Element for $number {
            const BYTES: usize = size_of::<$number>();

            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }

            fn read(bytes: &[u8]) -> Self {
                let mut own = [0; size_of::<$number>()];
                own.copy_from_slice(bytes);
                Self::from_le_bytes(own)
            }
        }
    )*};
}

element!(u8, u16, i32, f32, f64);

impl Number for f32 {
    fn plus(self, other: Self) -> Self {
        self + other
    }
}

impl Number for f64 {
    fn plus(self, other: Self) -> Self {
        self + other
    }
}

/// Writes numbers to the front of a buffer, and returns their bytes.
pub(crate) fn encode<'b, T: Element>(values: &[T], buffer: &'b mut [u8]) -> &'b mut [u8] {
    let bytes = &mut buffer[..values.len() * T::BYTES];
    for (value, place) in values.iter().zip(bytes.chunks_exact_mut(T::BYTES)) {
        value.write(place);
    }
    bytes
}

pub(crate) fn decode<T: Element>(bytes: &[u8], values: &mut [T]) {
    for (value, place) in values.iter_mut().zip(bytes.chunks_exact(T::BYTES)) {
        *value = T::read(place);
    }
}

/// Adds numbers to those of `sum`.
pub(crate) fn add<T: Number>(sum: &mut [u8], more: &[u8]) {
    for (sum, more) in sum
        .chunks_exact_mut(T::BYTES)
        .zip(more.chunks_exact(T::BYTES))
    {
        T::read(sum).plus(T::read(more)).write(sum);
    }
}
