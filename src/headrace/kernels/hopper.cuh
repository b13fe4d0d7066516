// What the kernels for Hopper ask of the device. All assembly but the product's instruction is here, so that a test can
// put a model of the device in its place.

typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(64) TensorMap { u64 words[16]; };

#define SHARED_ROOM(name) extern __shared__ unsigned char name[]
#define SHARED(type, name) __shared__ type name

constexpr int LINE = 128;  // bytes that are swizzled together in shared memory
constexpr u64 READ_ONCE = 0x12F0000000000000ull, READ_AGAIN = 0x1000000000000000ull;  // L2 gives the first up at once
constexpr u32 ALL = 0xFFFFFFFFu;

__device__ __forceinline__ u32 address(const void *shared) { return (u32)__cvta_generic_to_shared(shared); }

// ── Kernels after each other (`kernels.launch`) ─────────────────────────────────────────────────────────

__device__ __forceinline__ void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ── Barriers ────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void begin_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and says that so many bytes will.
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void await(u32 barrier, u32 parity) {
    asm volatile("{\n .reg .pred done;\nAGAIN:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 " @done bra DONE;\n bra AGAIN;\nDONE:\n}" ::"r"(barrier), "r"(parity) : "memory");
}
template <int THREADS> __device__ __forceinline__ void await_each_other() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// ── Copies ──────────────────────────────────────────────────────────────────────────────────────────────

// What a map says is at hand when the first tile is fetched.
__device__ __forceinline__ void prepare_fetch(const TensorMap *from) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(from) : "memory");
}
// A tile of the map's size, swizzled: the 16 bytes c of row r lie at c ^ r % 8. `to` is a multiple of 1,024 bytes, or
// of the swizzle's eight rows from there.
__device__ __forceinline__ void fetch(u32 to, const TensorMap *from, int column, int row, u32 barrier, u64 hint) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(from), "r"(column), "r"(row), "r"(barrier), "l"(hint) : "memory");
}
// As they are. Addresses and number are multiples of 16.
__device__ __forceinline__ void fetch_bytes(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void clear_16_bytes(u32 shared) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
}
// From memory that other blocks write meanwhile, at a multiple of the array's size or of 16 bytes.
template <int COUNT> __device__ __forceinline__ void load_from_all(float (&to)[COUNT], const float *from) {
    if constexpr (COUNT == 2)
        asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "l"(from) : "memory");
    else
#pragma unroll
        for (int i = 0; i < COUNT; i += 4)
            asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(to[i]), "=f"(to[i + 1]), "=f"(to[i + 2]), "=f"(to[i + 3]) : "l"(from + i) : "memory");
}
// What was written to shared memory comes before copies into it.
__device__ __forceinline__ void before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ── Numbers ─────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xFFFF0000u); }
__device__ __forceinline__ float lowest() { return __int_as_float(0xFF800000); }
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float inverse_root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ── Tensor cores, 16 × 8 × 16 ───────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void load(u32 (&a)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ u32 transposed(u32 both) {
    u32 other;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(other) : "r"(both));
    return other;
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
