// What CUDA reaches on a card with the layouts of csrc/shaders/blocks.glsl: a bound for the Vulkan kernels.
//
//     nvcc -O3 -std=c++17 -cudart static -gencode arch=compute_90,code=sm_90 -o cuda_bounds cuda_bounds.cu
//
// It prints lines, then one JSON object: GB/s of a copy, of matrix by row in Q4_0 and F16, and of listed rows
// that are added up (down by neuron); microseconds of an empty node of a graph of 500, and of a handshake with
// a thread of the host by stream memory operations. Results of the kernels are compared with the host's.
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#define CHECK(call)                                                                            \
    do {                                                                                       \
        const cudaError_t error_ = (call);                                                     \
        if (error_ != cudaSuccess) {                                                           \
            std::printf("%s: %s\n{\"failed\": \"%s\"}\n", #call, cudaGetErrorString(error_), #call); \
            std::exit(1);                                                                      \
        }                                                                                      \
    } while (0)

constexpr int kBlock = 32, kChunks = 32, kRowsOfGroup = 8, kUnroll = 4;

// A row is cut into 32 chunks of consecutive blocks. Block i of chunk c is stored at i * 32 + c.
__host__ __device__ inline int place(int blocks, int block) {
    const int chunk = blocks / kChunks;
    return block % chunk * kChunks + block / chunk;
}

// Codes as uint4 (weights 0 to 15 in the lower halves of the bytes), scales as halves behind all codes.
__global__ void gemv_q4_0(const uint4* codes, const __half* scales, const int4* x, const float2* x_factors,
                          float* out, int rows, int blocks) {
    __shared__ float partial[256];
    const int i = threadIdx.x, row = blockIdx.x * kRowsOfGroup + i % kRowsOfGroup, chunk = i / kRowsOfGroup;
    const int of_chunk = blocks / kChunks;
    float sum = 0;
    if (row < rows) {
#pragma unroll kUnroll
        for (int k = 0; k < of_chunk; ++k) {
            const size_t at = size_t(row) * blocks + k * kChunks + chunk;
            const int block = chunk * of_chunk + k;
            const uint4 w = codes[at];
            const int4 low = x[2 * block], high = x[2 * block + 1];
            int dot = __dp4a(int(w.x & 0x0f0f0f0f), low.x, 0);
            dot = __dp4a(int(w.y & 0x0f0f0f0f), low.y, dot);
            dot = __dp4a(int(w.z & 0x0f0f0f0f), low.z, dot);
            dot = __dp4a(int(w.w & 0x0f0f0f0f), low.w, dot);
            dot = __dp4a(int(w.x >> 4 & 0x0f0f0f0f), high.x, dot);
            dot = __dp4a(int(w.y >> 4 & 0x0f0f0f0f), high.y, dot);
            dot = __dp4a(int(w.z >> 4 & 0x0f0f0f0f), high.z, dot);
            dot = __dp4a(int(w.w >> 4 & 0x0f0f0f0f), high.w, dot);
            const float2 f = x_factors[block];  // of the input: its scale, and scale times sum of codes
            sum += __half2float(scales[at]) * (f.x * float(dot) - 8 * f.y);
        }
    }
    partial[i] = sum;
    __syncthreads();
    if (i >= kRowsOfGroup || blockIdx.x * kRowsOfGroup + i >= rows) return;
    for (int c = 1; c < kChunks; ++c) sum += partial[c * kRowsOfGroup + i];
    out[blockIdx.x * kRowsOfGroup + i] = sum;
}

// Units of 8 halves: four of a block, all first ones of the 32 chunks' blocks before all second ones.
__global__ void gemv_f16(const uint4* units, const float4* x, float* out, int rows, int blocks) {
    __shared__ float partial[256];
    const int i = threadIdx.x, row = blockIdx.x * kRowsOfGroup + i % kRowsOfGroup, chunk = i / kRowsOfGroup;
    const int of_chunk = blocks / kChunks;
    float sum = 0;
    if (row < rows) {
        for (int k = 0; k < of_chunk; ++k) {
            const size_t at = 4 * (size_t(row) * blocks + k * kChunks) + chunk;
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                const uint4 w = units[at + u * kChunks];
                const __half2* h = reinterpret_cast<const __half2*>(&w);
                const float4 a = x[(chunk * of_chunk + k) * 8 + 2 * u], b = x[(chunk * of_chunk + k) * 8 + 2 * u + 1];
                const float2 p = __half22float2(h[0]), q = __half22float2(h[1]);
                const float2 r = __half22float2(h[2]), s = __half22float2(h[3]);
                sum += p.x * a.x + p.y * a.y + q.x * a.z + q.y * a.w;
                sum += r.x * b.x + r.y * b.y + s.x * b.z + s.y * b.w;
            }
        }
    }
    partial[i] = sum;
    __syncthreads();
    if (i >= kRowsOfGroup || blockIdx.x * kRowsOfGroup + i >= rows) return;
    for (int c = 1; c < kChunks; ++c) sum += partial[c * kRowsOfGroup + i];
    out[blockIdx.x * kRowsOfGroup + i] = sum;
}

// Listed rows of F16 times their coefficients: a thread has a unit of 8 outputs, as units are stored. Each
// group adds a leaf of the list; the leaves are added by another kernel in the engine, which is not timed.
__global__ void down_f16(const uint4* units, const int* listed, const float* coefficients, float* partial,
                         int count, int leaf, int units_of_row) {
    const int unit = blockIdx.x * blockDim.x + threadIdx.x;
    if (unit >= units_of_row) return;
    float sums[8] = {};
    const int begin = blockIdx.y * leaf, end = min(begin + leaf, count);
#pragma unroll 4
    for (int k = begin; k < end; ++k) {
        const uint4 w = units[size_t(listed[k]) * units_of_row + unit];
        const __half2* h = reinterpret_cast<const __half2*>(&w);
        const float c = coefficients[k];
        for (int j = 0; j < 4; ++j) {
            const float2 v = __half22float2(h[j]);
            sums[2 * j] += c * v.x;
            sums[2 * j + 1] += c * v.y;
        }
    }
    for (int j = 0; j < 8; ++j) partial[(size_t(blockIdx.y) * units_of_row + unit) * 8 + j] = sums[j];
}

__global__ void empty() {}

// Milliseconds of a run, the least of seven.
template <class Run> float milliseconds(cudaStream_t stream, Run run) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    float best = 1e30f;
    run();
    for (int i = 0; i < 7; ++i) {
        float took = 0;
        CHECK(cudaEventRecord(begin, stream));
        run();
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&took, begin, end));
        best = std::fmin(best, took);
    }
    return best;
}

template <class T> T* device(const std::vector<T>& values) {
    T* there = nullptr;
    CHECK(cudaMalloc(&there, values.size() * sizeof(T)));
    CHECK(cudaMemcpy(there, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return there;
}

uint32_t random_word() {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return state ^ state >> 16;
}
float random_float() { return float(random_word() % 2001) / 1000 - 1; }

std::string found;
void note(const char* name, double value) {
    std::printf("%s: %.4g\n", name, value);
    char text[120];
    std::snprintf(text, sizeof text, "%s\"%s\": %.5g", found.empty() ? "" : ", ", name, value);
    found += text;
}

void matrices(cudaStream_t stream, int rows, int columns) {
    const int blocks = columns / kBlock;
    const std::string shape = " " + std::to_string(rows) + "x" + std::to_string(columns);
    std::vector<float> out(rows);
    float* result = device(out);

    std::vector<uint4> codes(size_t(rows) * blocks);
    std::vector<__half> scales(codes.size(), __float2half(0.01f));
    for (uint4& each : codes) each = {random_word(), random_word(), random_word(), random_word()};
    std::vector<int4> x(2 * blocks);
    std::vector<float2> factors(blocks);
    for (int block = 0; block < blocks; ++block) {
        int sum = 0;
        signed char bytes[32];
        for (signed char& each : bytes) sum += each = (signed char)(random_word() % 255 - 127);
        std::memcpy(&x[2 * block], bytes, 32);
        factors[block] = {0.02f, 0.02f * float(sum)};
    }
    uint4* w = device(codes);
    __half* s = device(scales);
    int4* input = device(x);
    float2* f = device(factors);
    const int groups = (rows + kRowsOfGroup - 1) / kRowsOfGroup;
    const float q4 = milliseconds(stream, [&] {
        gemv_q4_0<<<groups, 256, 0, stream>>>(w, s, input, f, result, rows, blocks);
    });
    CHECK(cudaGetLastError());
    note(("gemv_q4_0" + shape + "_gb_s").c_str(), double(codes.size()) * 18 / q4 / 1e6);
    CHECK(cudaMemcpy(out.data(), result, rows * sizeof(float), cudaMemcpyDeviceToHost));
    double worst = 0, largest = 0;
    for (int row = 0; row < rows; row += rows / 7) {
        double sum = 0;
        for (int block = 0; block < blocks; ++block) {
            const auto* c = reinterpret_cast<const unsigned char*>(&codes[size_t(row) * blocks + place(blocks, block)]);
            const auto* v = reinterpret_cast<const signed char*>(&x[2 * block]);
            for (int i = 0; i < 16; ++i)
                sum += 0.02 * double(__half2float(scales[0])) * (((c[i] & 15) - 8) * v[i] + ((c[i] >> 4) - 8) * v[16 + i]);
        }
        worst = std::fmax(worst, std::fabs(sum - out[row]));
        largest = std::fmax(largest, std::fabs(sum));
    }
    note(("gemv_q4_0" + shape + "_error").c_str(), worst / largest);
    cudaFree(w), cudaFree(s), cudaFree(input), cudaFree(f);

    std::vector<__half> halves(size_t(rows) * columns);
    for (__half& each : halves) each = __float2half(random_float());
    std::vector<float> y(columns);
    for (float& each : y) each = random_float();
    __half* h = device(halves);
    float* v = device(y);
    const float f16 = milliseconds(stream, [&] {
        gemv_f16<<<groups, 256, 0, stream>>>((const uint4*)h, (const float4*)v, result, rows, blocks);
    });
    CHECK(cudaGetLastError());
    note(("gemv_f16" + shape + "_gb_s").c_str(), double(halves.size()) * 2 / f16 / 1e6);

    // A tenth of the rows of a matrix by neuron, in leaves of 64.
    const int units = columns / 8;
    std::vector<int> listed;
    std::vector<float> coefficients;
    for (int row = 0; row < rows; ++row)
        if (random_word() % 10 == 0) listed.push_back(row), coefficients.push_back(random_float());
    const int count = int(listed.size()), leaf = 64, leaves = (count + leaf - 1) / leaf;
    int* l = device(listed);
    float* c = device(coefficients);
    float* partial = device(std::vector<float>(size_t(leaves) * columns));
    const float down = milliseconds(stream, [&] {
        down_f16<<<dim3((units + 63) / 64, leaves), 64, 0, stream>>>((const uint4*)h, l, c, partial, count, leaf, units);
    });
    CHECK(cudaGetLastError());
    note(("down_f16_tenth" + shape + "_gb_s").c_str(), double(count) * columns * 2 / down / 1e6);
    cudaFree(h), cudaFree(v), cudaFree(l), cudaFree(c), cudaFree(partial), cudaFree(result);
}

void copies(cudaStream_t stream) {
    const size_t bytes = size_t(1) << 30;
    char *a = nullptr, *b = nullptr, *host = nullptr;
    CHECK(cudaMalloc(&a, bytes));
    CHECK(cudaMalloc(&b, bytes));
    CHECK(cudaMallocHost(&host, bytes / 8));
    const auto copy = [&](void* to, void* from, size_t n, cudaMemcpyKind kind) {
        return milliseconds(stream, [&] { CHECK(cudaMemcpyAsync(to, from, n, kind, stream)); });
    };
    note("copy_gb_s", 2.0 * bytes / copy(b, a, bytes, cudaMemcpyDeviceToDevice) / 1e6);
    note("to_gpu_gb_s", bytes / 8.0 / copy(a, host, bytes / 8, cudaMemcpyHostToDevice) / 1e6);
    note("from_gpu_gb_s", bytes / 8.0 / copy(host, a, bytes / 8, cudaMemcpyDeviceToHost) / 1e6);
    cudaFree(a), cudaFree(b), cudaFreeHost(host);
}

void graph(cudaStream_t stream) {
    constexpr int nodes = 500;
    cudaGraph_t made;
    cudaGraphExec_t ready;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < nodes; ++i) empty<<<1, 32, 0, stream>>>();
    CHECK(cudaStreamEndCapture(stream, &made));
    CHECK(cudaGraphInstantiate(&ready, made, 0));
    note("graph_node_us", 1e3 * milliseconds(stream, [&] { CHECK(cudaGraphLaunch(ready, stream)); }) / nodes);
    const float launches = milliseconds(stream, [&] {
        for (int i = 0; i < nodes; ++i) empty<<<1, 32, 0, stream>>>();
    });
    note("launch_us", 1e3 * launches / nodes);
}

// The stream writes 2 i + 1 and waits for 2 i + 2; a thread of the host answers.
void handshakes(cudaStream_t stream) {
    using Operation = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
    void *write = nullptr, *wait = nullptr;
    cudaDriverEntryPointQueryResult answer;
    constexpr unsigned version = 12000;  // of the functions' interface
    const auto find = [&answer](const char* name, void** function) {
        return cudaGetDriverEntryPointByVersion(name, function, version, cudaEnableDefault, &answer) == cudaSuccess &&
               *function;
    };
    if (!find("cuStreamWriteValue32", &write) || !find("cuStreamWaitValue32", &wait)) {
        std::printf("handshake: this driver has no stream memory operations\n");
        return;
    }
    constexpr int rounds = 200;
    std::atomic<uint32_t>* words = nullptr;
    CHECK(cudaHostAlloc(reinterpret_cast<void**>(&words), 256, cudaHostAllocMapped));
    void* there = nullptr;
    CHECK(cudaHostGetDevicePointer(&there, words, 0));
    words[0] = words[32] = 0;
    const CUdeviceptr ask = CUdeviceptr(there), told = ask + 128;
    std::thread other([&] {
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(5);
        for (uint32_t i = 1; i <= rounds; ++i) {
            while (words[0] < i && std::chrono::steady_clock::now() < until) {}
            words[32] = i;  // past the deadline, too: nothing hangs
        }
    });
    const auto start = std::chrono::steady_clock::now();
    for (uint32_t i = 1; i <= rounds; ++i) {
        reinterpret_cast<Operation>(write)(stream, ask, i, 0);
        reinterpret_cast<Operation>(wait)(stream, told, i, CU_STREAM_WAIT_VALUE_GEQ);
    }
    CHECK(cudaStreamSynchronize(stream));
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    other.join();
    note("handshake_us", took.count() / rounds);
}

int main() {
    int driver = 0;
    cudaDeviceProp p{};
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaGetDeviceProperties(&p, 0));
    std::printf("%s, sm_%d%d, driver %d\n", p.name, p.major, p.minor, driver);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    copies(stream);
    matrices(stream, 28672, 8192);
    matrices(stream, 4096, 4096);
    graph(stream);
    handshakes(stream);
    std::printf("{\"device\": \"%s\", %s}\n", p.name, found.c_str());
    return 0;
}
