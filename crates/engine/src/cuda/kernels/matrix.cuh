// The instructions of the tensor cores: operands from shared memory, and their product. For 16-bit
// element types; a source includes it after common.cuh.

#if !defined(REAL_F32)

// Four 8×8 matrices from shared memory; lanes 8i to 8i+7 hold the addresses of the i-th one's rows.
__device__ __forceinline__ void load_matrices(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&x)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

// c[16×8] += a[16×16]·b[16×8]. With g = lane/4 and t = lane%4 a thread has of c the elements
// (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1).
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if defined(REAL_F16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// c[16×8] += a[16×8]·b[8×8], half as long: of a a thread has (g, 2t) with (g, 2t+1) and (g+8, 2t)
// with (g+8, 2t+1), of b (2t, g) with (2t+1, g).
__device__ __forceinline__ void multiply_short(float (&c)[4], const u32 (&a)[2], u32 b) {
#if defined(REAL_F16)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
#endif
}

// c[16×8] += a[16×8]·b[8×8] for an `a` that is laid out as a result is, (g, 2t), (g, 2t+1),
// (g+8, 2t), (g+8, 2t+1), and of b (2t, g) and (2t+1, g): the instruction's own order of the sum
// is another, and a sum has none. Of each float it takes the sign, the exponent and the upper ten
// bits of the mantissa, cut off and not rounded.
__device__ __forceinline__ void multiply_floats(float (&c)[4], const float (&a)[4], float b0,
                                                float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[1])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// What cutting off takes from a number on average, where all mantissas are as likely as in
// products: a number times this has lost nothing.
constexpr float CUT = 1.000352f;

// An 8×8 matrix of 16-bit elements over a warp, transposed: from (g, 2t) with (g, 2t+1) to (2t, g)
// with (2t+1, g).
__device__ __forceinline__ u32 transpose(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

#endif  // !REAL_F32
