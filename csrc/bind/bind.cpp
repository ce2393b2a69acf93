// The module: the thread pool, processor features, and functions that run at once.
#include <atomic>
#include <chrono>

#include "bind/bind.h"
#include "simd/fetching.h"
#include "simd/top_k.h"

namespace hc {
namespace {

// The thread on which Python calls signal handlers; set when the module is loaded.
unsigned long main_thread;

// Returns the number of entries written to `ids` and `values`.
size_t bind_top_k(const Array<const float>& logits, const Maybe<const int32_t>& bias_ids,
                  const Maybe<const float>& bias, const Maybe<const uint64_t>& allowed,
                  const Array<int32_t>& ids, const Floats& values) {
    const int64_t n = int64_t(logits.size()), k = int64_t(std::min(ids.size(), values.size()));
    if (bias_ids.has_value() != bias.has_value() || (bias && bias->size() != bias_ids->size()))
        refuse("top_k: as many ids as values of the bias are needed");
    std::vector<std::pair<int32_t, float>> biases;
    for (size_t i = 0; bias && i < bias->size(); ++i)
        biases.push_back({bias_ids->data()[i], bias->data()[i]});
    const uint64_t* bits = vector_of(allowed, "top_k: allowed", (n + 63) / 64);
    nb::gil_scoped_release release;
    const auto best = top_k(logits.data(), n, k, std::move(biases), bits);
    for (size_t i = 0; i < best.size(); ++i) {
        values.data()[i] = best[i].first;
        ids.data()[i] = best[i].second;
    }
    return best.size();
}

// Measures the GB/s at which the pool's threads read a memory, for about `seconds`. Each thread reads
// `streams` places of a piece in turn: one stream may not have enough cache lines in flight to fill the bus.
double read_bandwidth(const std::string& isa, Pool& pool, const Memory& memory, double seconds, int streams) {
    const Kernels& k = kernels_of(isa);
    constexpr size_t kPiece = 1 << 20, kTurn = 1 << 10;
    const auto pieces = int64_t(memory.size() / kPiece);
    if (pieces < 1) refuse("the bandwidth probe needs at least 1 MiB");
    if (streams < 1 || streams > 8) refuse("the bandwidth probe reads 1 to 8 streams a thread");
    const size_t part = kPiece / size_t(streams) / kTurn * kTurn, turn = streams == 1 ? part : kTurn;
    std::atomic<int64_t> kept{0};  // keeps the compiler from removing the reads
    const auto read = [&](int64_t piece, const Scratch&) {
        const uint8_t* data = memory.data() + size_t(piece) * kPiece;
        for (size_t at = 0; at < part; at += turn)
            for (size_t stream = 0; stream < size_t(streams); ++stream)
                if (k.read(data + stream * part + at, turn) > 0) ++kept;
    };
    const std::vector<Step> steps{{[=] { return pieces; }, read}};
    const std::function<void()> check = check_signals();
    nb::gil_scoped_release release;
    const auto start = std::chrono::steady_clock::now();
    double elapsed = 0, bytes = 0;
    do {
        pool.run(steps, nullptr, check);
        bytes += double(pieces) * double(part) * streams;
        elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    } while (elapsed < seconds);
    return bytes / elapsed / 1e9;
}

}  // namespace

std::function<void()> check_signals() {
    if (PyThread_get_thread_ident() != main_thread) return {};
    return [] {
        nb::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals()) nb::raise_python_error();
    };
}

}  // namespace hc

NB_MODULE(_native, m) {
    using namespace hc;
    main_thread =
        nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident"));
    nb::class_<Pool>(m, "Pool")
        .def(nb::init<int>(), "threads"_a)
        .def_prop_ro("threads", &Pool::threads)
        .def("share_cores", &Pool::share_cores);
    bind_weights(m);
    bind_disk(m);
    nb::class_<BoundProgram> program = bind_ops(m);
    bind_ffn(m, program);
    bind_link(m, program);
    bind_quantise(m);
    bind_router(program);
    bind_states(program);
    bind_vulkan(m);
    m.def("top_k", &bind_top_k, "logits"_exact, "bias_ids"_maybe, "bias"_maybe, "allowed"_maybe, "ids"_exact,
          "values"_exact);
    m.def("isas", [] {
        std::vector<std::tuple<std::string, bool, bool>> states;
        for (const KnownIsa& isa : known_isas())
            states.emplace_back(isa.name, isa.runs, isa.kernels != nullptr);
        return states;
    });
    m.def("tile_fault", &tile_fault);
    m.def("has_tiles", [](const std::string& isa) { return kernels_of(isa).tile_input != nullptr; }, "isa"_a);
    m.def("fetching", [] { return std::pair{fetching.ahead, fetching.into_l2 ? 2 : 1}; });
    m.def("fetching_is_measured", [] { return fetching.measured; });
    m.def(
        "set_fetching",
        [](int64_t ahead, int level) {
            if (ahead < 0 || ahead > 1 << 20 || level < 1 || level > 2)
                refuse("fetching: 0 to 1048576 bytes ahead, into level 1 or 2");
            fetching = {ahead, level == 2, fetching.measured};
        },
        "ahead"_a, "level"_a);
    m.def("read_bandwidth", &read_bandwidth, "isa"_a, "pool"_a, "memory"_a, "seconds"_a, "streams"_a = 1);
}
