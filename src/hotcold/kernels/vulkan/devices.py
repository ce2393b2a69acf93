"""Devices that Vulkan's loader finds, and what to install if it finds none."""

from hotcold.kernels import _native
from hotcold.kernels.gpu import GPU

_INSTALL = "install the GPU's driver; on Debian or Ubuntu mesa-vulkan-drivers serves AMD and Intel"


def find_devices() -> tuple[list[GPU], str]:
    """Finds devices: see :func:`hotcold.kernels.gpus.find_gpus`."""
    try:
        devices = _native.vulkan_devices()
    except _native.VulkanError as error:
        return [], f"no GPU found: {error}"
    if not devices:
        return [], f"no GPU found: no driver offers a Vulkan device: {_INSTALL}"
    return [_gpu(each) for each in devices], ""


def _gpu(info: _native.VulkanDeviceInfo) -> GPU:
    return GPU(
        index=info.index,
        name=info.name,
        kind=info.kind,
        driver=info.driver,
        api=f"Vulkan {info.api}",
        uuid=info.uuid,
        memory_bytes=info.memory_bytes,
        free_bytes=info.free_bytes,
        unified=info.unified,
        problem=info.problem,
    )
