# SPDX-License-Identifier: Apache-2.0
# Installs the headers and the package files that find_package(kvcache) reads.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

target_include_directories(kvcache INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

set(kvcache_package_dir ${CMAKE_INSTALL_DATADIR}/cmake/kvcache)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/kvcache DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.hpp" PATTERN "*.inl" PATTERN "*.cuh")
install(TARGETS kvcache EXPORT kvcache-targets)
install(EXPORT kvcache-targets NAMESPACE kvcache:: DESTINATION ${kvcache_package_dir})

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/kvcache-config.cmake.in ${PROJECT_BINARY_DIR}/kvcache-config.cmake
  INSTALL_DESTINATION ${kvcache_package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/kvcache-config-version.cmake
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES ${PROJECT_BINARY_DIR}/kvcache-config.cmake ${PROJECT_BINARY_DIR}/kvcache-config-version.cmake
        DESTINATION ${kvcache_package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/kvcache)
