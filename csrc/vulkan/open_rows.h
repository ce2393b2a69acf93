// Opens blocks of a file that a GPU's shaders cannot read directly, before they are copied to the GPU.
#pragma once
#include <cstdint>

namespace hc::vulkan {

enum class OpenedType { kQ2K, kQ3K, kIQ4XS };

// Like `pack` of kernels/vulkan/packing.py, which specifies the layout: for each 32 weights of a row, `codes`
// has 16 bytes and `scales` 8. `blocks` counts these 32 weights in a row; it is a multiple of 8.
void open_rows(OpenedType type, const uint8_t* data, int64_t rows, int64_t blocks, uint8_t* codes,
               uint8_t* scales);
int64_t bytes_of_256(OpenedType type);

}  // namespace hc::vulkan
