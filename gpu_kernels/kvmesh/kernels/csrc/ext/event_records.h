// kvmesh.kernels._native.EventRecords: the records of a payload, made when they are asked for. The index takes them
// as they were read.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "event_batch.h"

namespace kvmesh {

// The events behind the object, all of them plain; null for an object of another type. As long as the object lives.
const WireBatch* events_of(PyObject* object);

}  // namespace kvmesh
