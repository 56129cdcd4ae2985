# Provides the target `yyjson::yyjson`, without a copy of it in our tree. In this order:
#   1. an installed yyjson (Debian's libyyjson-dev, vcpkg, Conan …);
#   2. the PyPI wheel `yyjson`, which carries yyjson's C source, if this Python has it (pip's build environment does);
#   3. that same wheel, fetched by pip into the build directory.
find_package(yyjson CONFIG QUIET)
if(TARGET yyjson::yyjson)
  message(STATUS "yyjson: installed, ${yyjson_DIR}")
  return()
endif()

set(_yyjson_find "import importlib.metadata as m; d = m.distribution('yyjson'); print(d.locate_file('yyjson'))")
execute_process(COMMAND ${Python_EXECUTABLE} -c "${_yyjson_find}"
  OUTPUT_VARIABLE YYJSON_SOURCE_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT EXISTS "${YYJSON_SOURCE_DIR}/yyjson.c")
  set(_yyjson_wheel ${CMAKE_BINARY_DIR}/_wheels)
  set(YYJSON_SOURCE_DIR ${_yyjson_wheel}/yyjson)
  if(NOT EXISTS "${YYJSON_SOURCE_DIR}/yyjson.c")
    message(STATUS "yyjson: fetching the wheel with pip")
    execute_process(COMMAND ${Python_EXECUTABLE} -m pip install --quiet --no-deps --only-binary :all:
        --target ${_yyjson_wheel} "yyjson>=4.0.6,<5"
      RESULT_VARIABLE _yyjson_failed ERROR_VARIABLE _yyjson_error)
    if(_yyjson_failed)
      message(FATAL_ERROR "The toolhost needs yyjson, and it is nowhere to be found. Install it with your package "
        "manager (libyyjson-dev) or with `${Python_EXECUTABLE} -m pip install yyjson`, then run cmake again.\n"
        "pip said: ${_yyjson_error}")
    endif()
  endif()
endif()
message(STATUS "yyjson: source of the wheel, ${YYJSON_SOURCE_DIR}")

add_library(yyjson STATIC ${YYJSON_SOURCE_DIR}/yyjson.c)
target_include_directories(yyjson SYSTEM PUBLIC ${YYJSON_SOURCE_DIR})
target_compile_options(yyjson PRIVATE -w)
add_library(yyjson::yyjson ALIAS yyjson)
