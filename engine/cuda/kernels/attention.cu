#include "device.cuh"
