// The disk's threads, and the expert caches that they fill.
#include "bind/bind.h"
#include "disk/cold_rows.h"
#include "disk/expert_cache.h"
#include "disk/probe.h"
#include "pack/pack.h"

namespace hc {
namespace {

// One matrix of each expert. `weights` has the rows of all slots, one after another; the file has [rows,
// row_bytes] for each expert, from its offset on. `each`: how many of a neuron's `pitch` interleaved rows are
// taken.
CachePart part_of(int64_t experts, int64_t slots, const Disk& disk, const WeightRows& weights, bool by_output,
                  int file, std::vector<int64_t> offsets, int64_t rows, int64_t row_bytes, int64_t each,
                  int64_t pitch) {
    Rows slot = weights.rows;
    const int64_t block = block_size(slot.type).bytes, per_column = block_size(slot.type).weights;
    if (slot.count % slots) refuse("expert cache: the places must have as many rows each");
    slot.count /= slots;
    if (rows < 1 || row_bytes < 1 || file < 0 || file >= disk.files())
        refuse("expert cache: no such part of a file");
    if (each < 1 || each > pitch || rows % pitch || (by_output && pitch > 1))
        refuse("expert cache: no such rows of a neuron");
    if (int64_t(offsets.size()) != experts) refuse("expert cache: an offset for each expert is needed");
    for (const int64_t offset : offsets)
        if (offset < 0) refuse("expert cache: offsets must not be negative");
    const Panels& panels = weights.panels;
    if (panels.neurons) {
        if (!by_output || (rows + kBlock - 1) / kBlock * kBlock != slot.cols ||
            row_bytes / block * per_column != slot.count || row_bytes % block)
            refuse("expert cache: the tensor does not fit the panels");
    } else if (by_output) {
        if (is_quantised(slot.type) || rows != slot.cols || row_bytes != slot.count * block)
            refuse("expert cache: the tensor does not fit the rows");
    } else if (rows / pitch * each != slot.count || row_bytes != row_size(slot.type, slot.cols)) {
        refuse("expert cache: the tensor does not fit the rows");
    }
    const int64_t stride =
        panels.neurons ? slot.count / panels.neurons * panels.bytes() : slot.count * slot.stride;
    return {
        weights.memory, {slot, panels, by_output}, stride, file, std::move(offsets), rows, row_bytes, each,
        pitch};
}

void add_part(ExpertCache& cache, const Disk& disk, const WeightRows& weights, bool by_output, int file,
              std::vector<int64_t> offsets, int64_t rows, int64_t row_bytes, int64_t each, int64_t pitch) {
    cache.add(part_of(cache.experts(), cache.slots(), disk, weights, by_output, file, std::move(offsets),
                      rows, row_bytes, each, pitch));
}

void add_cold_part(ColdRows& cold, const Disk& disk, const WeightRows& weights, int file,
                   std::vector<int64_t> offsets, int64_t rows, int64_t row_bytes, int64_t each,
                   int64_t pitch) {
    if (rows != cold.neurons() * pitch) refuse("cold rows: an expert does not have as many neurons");
    cold.add(part_of(cold.experts(), cold.experts(), disk, weights, false, file, std::move(offsets), rows,
                     row_bytes, each, pitch));
}

ReadWay way_of(std::optional<bool> rings) {
    return !rings ? ReadWay::kBest : *rings ? ReadWay::kRings : ReadWay::kThreads;
}

// Runs a load that checks for signals and gives up when a handler raises.
template <class Load> void fill_of(Load&& load) {
    const std::function<void()> check = check_signals();
    nb::gil_scoped_release release;
    load([&check] {
        if (check) check();
        return false;
    });
}

auto numbers(const LoadBatches::Counts& c) { return std::tuple{c.hits, c.misses, c.stalls, c.stall_ns}; }

}  // namespace

void bind_disk(nb::module_& m) {
    nb::exception<DiskError>(m, "DiskError", PyExc_RuntimeError);
    nb::class_<Disk>(m, "Disk")
        .def(
            "__init__",
            [](Disk* disk, int pieces, bool direct, std::optional<bool> rings) {
                new (disk) Disk(pieces, direct, way_of(rings));
            },
            "pieces"_a, "direct"_a, "rings"_a = nb::none())
        .def("add", &Disk::add, "file"_a)
        .def("direct", &Disk::direct, "number"_a)
        .def_prop_ro("threads", &Disk::threads)
        .def_prop_ro("rings", &Disk::rings)
        .def("hold", &Disk::hold, "holds"_a)
        .def("give_at_most", &Disk::give_at_most, "bytes"_a)
        .def("counts",
             [](Disk& disk) {
                 const Disk::Counts counts = disk.counts();
                 return std::tuple{counts.bytes, counts.reads, counts.busy_ns};
             })
        .def_static("staging_bytes", &Disk::staging_bytes, "row_bytes"_a, "by_output"_a)
        .def_static("at_once", &Disk::at_once, "pieces"_a, "bytes"_a, "rings"_a);
    m.def("why_no_rings", &why_no_rings);
    m.attr("DISK_READ_BYTES") = kRead;
    m.def(
        "probe_disk",
        [](int file, int64_t bytes, int depth, double seconds, bool sequential, std::optional<bool> rings) {
            nb::gil_scoped_release release;
            const DiskProbe probe{bytes, depth, seconds, sequential, way_of(rings)};
            const DiskSpeed speed = probe_disk(file, probe);
            return std::tuple{speed.bytes_per_s, speed.direct};
        },
        "file"_a, "bytes"_a, "depth"_a, "seconds"_a, "sequential"_a, "rings"_a = nb::none());
    nb::class_<ExpertCache>(m, "ExpertCache")
        .def(nb::init<std::shared_ptr<Disk>, std::string, int64_t, int64_t>(), "disk"_a, "name"_a,
             "experts"_a, "places"_a)
        .def("add", &add_part, "disk"_a, "weights"_a, "by_output"_a, "file"_a, "offsets"_a, "rows"_a,
             "row_bytes"_a, "each"_a = 1, "pitch"_a = 1)
        .def(
            "fill",
            [](ExpertCache& cache, const std::vector<int32_t>& experts, int64_t pinned) {
                fill_of([&](const Disk::GiveUp& give_up) { cache.fill(experts, pinned, give_up); });
            },
            "experts"_a, "kept"_a)
        .def_prop_ro("slots", &ExpertCache::slots)
        .def("counts", [](const ExpertCache& cache) { return numbers(cache.counts()); });
    nb::class_<ColdRows>(m, "ColdRows")
        .def(nb::init<std::shared_ptr<Disk>, std::string, int64_t, std::vector<int64_t>, int64_t, bool>(),
             "disk"_a, "name"_a, "neurons"_a, "hot"_a, "neurons_at_once"_a, "gates"_a)
        .def("add", &add_cold_part, "disk"_a, "weights"_a, "file"_a, "offsets"_a, "rows"_a, "row_bytes"_a,
             "each"_a = 1, "pitch"_a = 1)
        .def("fill",
             [](ColdRows& cold) { fill_of([&](const Disk::GiveUp& give_up) { cold.fill(give_up); }); })
        .def("counts", [](const ColdRows& cold) { return numbers(cold.counts()); });
}

}  // namespace hc
