// How the CPU library's functions are exported: C names, visible, everything else hidden.
#pragma once

#define KVMESH_API extern "C" __attribute__((visibility("default")))
